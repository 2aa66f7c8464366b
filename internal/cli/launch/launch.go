// Package launch finds the daemon of a home, starts one where none answers,
// and replaces one of another build. It is not the daemon: it only knows the
// command that runs one. Machines run on through everything it does.
package launch

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
)

// startLimit is how long a daemon may take to listen; it includes the repair
// of what a crash left.
const startLimit = 30 * time.Second

// stopLimit is how long a daemon may take to end its calls and leave.
const stopLimit = 20 * time.Second

// Status is what a daemon says of itself.
type Status = holdpointv1.DaemonStatusResponse

// Config configures a Launcher.
type Config struct {
	Home *home.Home
	// Build is this program's; a daemon of another one is replaced.
	Build string
	// Command runs a daemon of the home until it is told to stop; it calls
	// Announce. Empty where daemons cannot run: then none is started.
	Command []string
	// Say tells a person what was done, in one line without an end.
	Say func(message string)
}

// Launcher connects to the daemon of one home.
type Launcher struct{ cfg Config }

// New makes a Launcher.
func New(cfg Config) *Launcher { return &Launcher{cfg: cfg} }

// Connect gives a client of a daemon that answers and is of this build; it
// starts or replaces one if need be. The caller closes the client.
func (l *Launcher) Connect(ctx context.Context) (*client.Client, error) {
	c, err := l.dial(ctx, l.ensure)
	if err != nil {
		return nil, err
	}
	status, err := statusOf(ctx, c)
	switch {
	case err == nil && l.fits(status):
		return c, nil
	case err == nil, client.Unreachable(err):
		err = l.ensure(ctx)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Find gives a client of the daemon and its status, whatever its build; where
// none answers it fails and starts nothing.
func (l *Launcher) Find(ctx context.Context) (*client.Client, *Status, error) {
	c, err := l.dial(ctx, nil)
	if err != nil {
		return nil, nil, err
	}
	status, err := statusOf(ctx, c)
	if err != nil {
		c.Close()
		return nil, nil, err
	}
	return c, status, nil
}

// Start is Connect with the status of the daemon there is afterwards.
func (l *Launcher) Start(ctx context.Context) (*Status, error) {
	if err := l.ensure(ctx); err != nil {
		return nil, err
	}
	c, status, err := l.Find(ctx)
	if err != nil {
		return nil, err
	}
	c.Close()
	return status, nil
}

// Stop ends the daemon and waits until it is gone. It returns the pid it had,
// 0 where none ran.
func (l *Launcher) Stop(ctx context.Context) (int64, error) {
	c, status, err := l.Find(ctx)
	if client.Unreachable(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer c.Close()
	return status.GetPid(), l.stop(ctx, c, status)
}

func (l *Launcher) dial(ctx context.Context, reconnect func(context.Context) error) (*client.Client, error) {
	return client.Dial(ctx, client.Options{Socket: l.cfg.Home.Socket(), Reconnect: reconnect})
}

// ensure makes a daemon of this build answer.
func (l *Launcher) ensure(ctx context.Context) error {
	if ok, err := l.answers(ctx); ok || err != nil {
		return err
	}
	if len(l.cfg.Command) == 0 {
		return errdefs.New(errdefs.Unsupported, "no daemon answers at %s and none can run on this system; run it on Linux and forward its socket", l.cfg.Home.Socket())
	}
	if err := l.cfg.Home.Create(); err != nil {
		return err
	}
	// One of us starts it; the others wait here, and find it.
	unlock, err := lock(ctx, l.cfg.Home.Dir()+"/start.lock")
	if err != nil {
		return fmt.Errorf("wait for the daemon's start: %w", err)
	}
	defer unlock()
	c, status, err := l.Find(ctx)
	switch {
	case client.Unreachable(err):
	case err != nil:
		return err
	case status.GetBuild() == l.cfg.Build:
		c.Close()
		return nil
	default:
		err := l.stop(ctx, c, status)
		c.Close()
		if err != nil {
			return err
		}
		l.cfg.Say(fmt.Sprintf("replaced the daemon of build %s (pid %d); machines run on", status.GetBuild(), status.GetPid()))
	}
	return l.start(ctx)
}

// answers reports whether a daemon that will do is there.
func (l *Launcher) answers(ctx context.Context) (bool, error) {
	c, status, err := l.Find(ctx)
	if err != nil {
		if client.Unreachable(err) {
			return false, nil
		}
		return false, err
	}
	c.Close()
	return l.fits(status), nil
}

// fits reports whether the daemon will do. Where none can run, the one that is
// forwarded is as good as any.
func (l *Launcher) fits(status *Status) bool {
	return status.GetBuild() == l.cfg.Build || len(l.cfg.Command) == 0
}

// start runs the daemon and waits until it listens.
func (l *Launcher) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	pid, err := spawn(ctx, l.cfg.Command, l.cfg.Home.DaemonLog())
	for errdefs.Is(err, errdefs.Conflict) {
		// Somebody else, a service manager for one, started it at the same
		// time, holds the home's lock and will listen; or one that was killed
		// is not quite gone, and nobody will.
		if l.awaitOther(ctx) {
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		pid, err = spawn(ctx, l.cfg.Command, l.cfg.Home.DaemonLog())
	}
	if err != nil {
		return err
	}
	l.cfg.Say(fmt.Sprintf("started the daemon (pid %d)", pid))
	if why, fix := l.cfg.Home.Unfit(); why != "" {
		l.cfg.Say("warning: " + why + "; " + fix)
	}
	return nil
}

// otherLimit is how long another daemon that holds the lock may take to listen
// before we look whether it still does.
const otherLimit = 2 * time.Second

// awaitOther reports whether another daemon came to listen in time.
func (l *Launcher) awaitOther(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, otherLimit)
	defer cancel()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		c, _, err := l.Find(ctx)
		if err == nil {
			c.Close()
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-ticker.C:
		}
	}
}

// stop ends the daemon that answered with status, and waits until its lock is
// free: only then may the next one start.
func (l *Launcher) stop(ctx context.Context, c *client.Client, status *Status) error {
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	_, err := c.Daemon.Stop(ctx, connect.NewRequest(&holdpointv1.DaemonStopRequest{}))
	// A daemon may be gone before its answer is sent.
	if err != nil && !client.Unreachable(err) {
		return err
	}
	unlock, err := lock(ctx, l.cfg.Home.Lock())
	if err != nil {
		return errdefs.New(errdefs.KindOf(err), "stop the daemon (pid %d): it has not ended; look into %s, or end it with `kill %d`",
			status.GetPid(), l.cfg.Home.DaemonLog(), status.GetPid())
	}
	unlock()
	return nil
}

func statusOf(ctx context.Context, c *client.Client) (*Status, error) {
	res, err := c.Daemon.Status(ctx, connect.NewRequest(&holdpointv1.DaemonStatusRequest{}))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}
