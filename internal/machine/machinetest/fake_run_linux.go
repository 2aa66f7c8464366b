package machinetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakedisk"
)

// fakeRun is a run seen from outside. Its goroutine waits for the process's
// exit and is waited for by Close.
type fakeRun struct {
	spec    fakeSpec
	cfg     machine.RunConfig
	process machine.Process
	pidfd   *os.File
	exited  chan struct{}
	watcher sync.WaitGroup

	mu     sync.Mutex
	killed bool
	closed bool
	exit   machine.Exit
}

func newFakeRun(spec fakeSpec, p machine.Process) (*fakeRun, error) {
	fd, err := unix.PidfdOpen(p.PID, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", p.PID, err)
	}
	r := &fakeRun{spec: spec, cfg: spec.Run, process: p, pidfd: os.NewFile(uintptr(fd), "pidfd"), exited: make(chan struct{})}
	if now, err := identify(p.PID); err != nil || now != p {
		r.pidfd.Close()
		return nil, fmt.Errorf("open process %d: it has ended", p.PID)
	}
	r.watcher.Go(r.watch)
	return r, nil
}

// watch waits for the exit, reaps the process if it is our child, and decides
// how it ended.
func (r *fakeRun) watch() {
	conn, err := r.pidfd.SyscallConn()
	if err != nil {
		return
	}
	ended := false
	err = conn.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		ended = err == nil && n == 1
		if ended {
			var info unix.Siginfo
			_ = unix.Waitid(unix.P_PIDFD, int(fd), &info, unix.WEXITED|unix.WNOHANG, nil)
		}
		return ended
	})
	if err != nil || !ended {
		return // closed
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.exit = machine.Exit{Reason: machine.Crashed, Message: "the fake machine's process ended"}
	if r.killed {
		r.exit = machine.Exit{Reason: machine.Killed}
	}
	if data, err := os.ReadFile(exitFile(r.cfg)); err == nil {
		var said machine.Exit
		if json.Unmarshal(data, &said) == nil {
			r.exit = said
		}
	}
	close(r.exited)
}

func (r *fakeRun) Process() machine.Process { return r.process }

func (r *fakeRun) Pause(ctx context.Context) error {
	_, err := r.call(ctx, request{Op: "pause"})
	return err
}

func (r *fakeRun) Resume(ctx context.Context) error {
	_, err := r.call(ctx, request{Op: "resume"})
	return err
}

func (r *fakeRun) Running(ctx context.Context) (bool, error) {
	a, err := r.call(ctx, request{Op: "status"})
	return a.Running, err
}

// AwaitStall waits for what never happens: a fake machine writes no disk.
func (r *fakeRun) AwaitStall(ctx context.Context) error {
	select {
	case <-r.exited:
		return r.over("watch")
	case <-ctx.Done():
		return fmt.Errorf("watch of run %s: %w", r.cfg.RunID, context.Cause(ctx))
	}
}

func (r *fakeRun) SwitchDisk(ctx context.Context, top machine.Layer) error {
	_, err := r.call(ctx, request{Op: "switch", Layer: top})
	return err
}

// SwitchAtRest checks the new top first, as a real one prepares it.
func (r *fakeRun) SwitchAtRest(ctx context.Context, top machine.Layer, atRest machine.AtRest) (switched bool, err error) {
	if err := fakedisk.Check(top.Path); err != nil {
		return false, err
	}
	err = atRest(func(ctx context.Context) error {
		_, err := r.call(ctx, request{Op: "switch-at-rest", Layer: top})
		switched = err == nil
		return err
	})
	if err == nil && !switched {
		err = errdefs.New(errdefs.Internal, "the disk was not at rest")
	}
	return switched, err
}

// ReplaceLayers checks what a real one would; the machine has read its layers
// when it began.
func (r *fakeRun) ReplaceLayers(ctx context.Context, chain []machine.Layer, from, to int, merged machine.Layer) error {
	if from < 1 || to <= from || to >= len(chain) {
		return errdefs.New(errdefs.Invalid, "replace layers %d to %d of %d", from, to, len(chain))
	}
	_, err := r.call(ctx, request{Op: "replace", Layer: merged})
	return err
}

func (r *fakeRun) DialLink(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", linkSocket(r.cfg))
	if err != nil {
		return nil, r.failure(ctx, "dial link", err)
	}
	return conn, nil
}

func (r *fakeRun) Kill(ctx context.Context) error {
	r.mu.Lock()
	if machine.Ended(r) {
		r.mu.Unlock()
		return r.over("kill")
	}
	if r.closed {
		r.mu.Unlock()
		return errdefs.New(errdefs.WrongState, "kill run %s: it was let go of", r.cfg.RunID)
	}
	r.killed = true
	err := r.signal(unix.SIGKILL)
	r.mu.Unlock()
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill run %s: %w", r.cfg.RunID, err)
	}
	select {
	case <-r.exited:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("kill run %s: %w", r.cfg.RunID, context.Cause(ctx))
	}
}

// signal leaves the pidfd in the poller, as os.File.Fd would not.
func (r *fakeRun) signal(sig unix.Signal) error {
	conn, err := r.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = conn.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), sig, nil, 0) })
	return errors.Join(err, sent)
}

func (r *fakeRun) Exited() <-chan struct{} { return r.exited }

func (r *fakeRun) Exit() machine.Exit {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.exit
}

func (r *fakeRun) Close() error {
	r.mu.Lock()
	closed := r.closed
	r.closed = true
	r.mu.Unlock()
	if closed {
		return nil
	}
	err := r.pidfd.Close()
	r.watcher.Wait()
	return err
}

func (r *fakeRun) over(verb string) error {
	return errdefs.New(errdefs.WrongState, "%s: run %s has ended", verb, r.cfg.RunID)
}

// failure says what a failed conversation with the process means.
func (r *fakeRun) failure(ctx context.Context, verb string, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%s of run %s: %w", verb, r.cfg.RunID, context.Cause(ctx))
	}
	// The socket is closed by an exit, which is proven in a moment.
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ECONNRESET) ||
		errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EPIPE) {
		select {
		case <-r.exited:
			return r.over(verb)
		case <-ctx.Done():
		}
	}
	return fmt.Errorf("%s of run %s: %w", verb, r.cfg.RunID, err)
}

// call has one conversation with the machine's process: a line each way.
func (r *fakeRun) call(ctx context.Context, req request) (answer, error) {
	var a answer
	if machine.Ended(r) {
		return a, r.over(req.Op)
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", controlSocket(r.cfg))
	if err != nil {
		return a, r.failure(ctx, req.Op, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := json.NewEncoder(conn).Encode(req); err != nil {
		return a, r.failure(ctx, req.Op, err)
	}
	if err := json.NewDecoder(conn).Decode(&a); err != nil {
		return a, r.failure(ctx, req.Op, err)
	}
	if a.Error != "" {
		return a, errdefs.New(errdefs.Kind(a.Kind), "%s of run %s: %s", req.Op, r.cfg.RunID, a.Error)
	}
	return a, nil
}
