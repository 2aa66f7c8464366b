//go:build linux

package monitor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/monitor/socket"
)

// StartConfig is how to spawn a monitor.
type StartConfig struct {
	// Dir is the run's folder.
	Dir string
	// Config, not nil, is written to Dir first; a successor needs none.
	Config *Config
	// Executable and Args are the hidden verb that ends in
	// process.Run.
	Executable string
	Args       []string
	// Env is the monitor's environment; nil is ours.
	Env []string
	// Files is the door to the disk; nil is the usual one.
	Files *durable.FS
}

// Start spawns a monitor, detached: it outlives us. It returns once the
// monitor answers, which is when the run has been launched (or adopted) and
// its guest executes. If the monitor fails before, the error is its own. Two
// callers of Start for one folder get clients of one monitor. ctx bounds the
// wait alone: a monitor that was spawned goes on. So do limits of our own: a
// monitor that holds the folder's lock and cannot be reached, or one that does
// not get its run under way, is DEADLINE, and the error names its process.
func Start(ctx context.Context, cfg StartConfig) (*Client, error) {
	if cfg.Config != nil {
		if err := WriteConfig(cfg.Files, cfg.Dir, *cfg.Config); err != nil {
			return nil, err
		}
	}
	file, err := ReadConfig(cfg.Dir)
	if err != nil {
		return nil, err
	}
	if err := cfg.Files.MkdirAll(file.Run.SocketDir); err != nil {
		return nil, err
	}
	w, err := socket.NewWatcher(cfg.Dir, file.Run.SocketDir)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	before := recordBytes(cfg.Dir)
	died, err := spawn(cfg, file.Group)
	if err != nil {
		return nil, err
	}
	limit := time.NewTimer(beginLimit)
	defer limit.Stop()
	for again := spawnAgain; ; {
		c, err := Connect(ctx, cfg.Dir)
		if err == nil || !errors.Is(err, ErrGone) {
			return c, err
		}
		select {
		case <-w.Events:
		case <-died:
			died = nil // it has failed, or lost to another monitor of the folder
			limit.Reset(patience(cfg.Dir))
		case <-limit.C:
			return nil, unanswered(cfg.Dir)
		case <-ctx.Done():
			return nil, fmt.Errorf("await monitor of machine %s: %w", file.Name(), ctx.Err())
		}
		if died != nil {
			continue
		}
		alive, err := Alive(cfg.Dir)
		switch {
		case err == nil && alive:
		case err == nil && again > 0 && bytes.Equal(before, recordBytes(cfg.Dir)):
			again--
			if died, err = spawn(cfg, file.Group); err != nil {
				return nil, err
			}
		default:
			return nil, errors.Join(err, lastWord(cfg.Dir))
		}
	}
}

// spawnAgain is how often a monitor is spawned anew that died without having
// recorded anything: its predecessor, killed and not quite gone yet, still had
// the folder's lock.
const spawnAgain = 2

// recordBytes is the record as it stands; nil when there is none.
func recordBytes(dir string) []byte {
	b, _ := os.ReadFile(filepath.Join(dir, recordFile)) // only compared
	return b
}

// answerLimit is how long a living monitor may take to answer what it knows
// at once. beginLimit is how long one may take until its run is under way, a
// little more than it gives itself.
const (
	answerLimit = 10 * time.Second
	beginLimit  = 75 * time.Second
)

// patience is how long another monitor, which has the folder's lock, is waited
// for: it may be just beginning the run.
func patience(dir string) time.Duration {
	if rec, err := ReadRecord(dir); err == nil && rec.Phase == Booting && rec.Process == nil {
		return beginLimit
	}
	return answerLimit
}

// unanswered is the error for a monitor that lives and does not answer.
func unanswered(dir string) error {
	who := "no process of this user is seen to hold its lock"
	if pid, err := Holder(dir); err == nil && pid > 0 {
		who = fmt.Sprintf("process %d holds its lock", pid)
	}
	return errdefs.New(errdefs.Deadline, "machine %s: its monitor does not answer (%s); try again, or stop the machine by force", nameOf(dir), who)
}

// Ensure connects to the monitor of the folder, or starts a successor if there
// is none. It may be called by several at once. WRONG_STATE means that the run
// has ended; its record says how.
func Ensure(ctx context.Context, cfg StartConfig) (*Client, error) {
	c, err := Connect(ctx, cfg.Dir)
	if err == nil || !errors.Is(err, ErrGone) {
		return c, err
	}
	rec, err := ReadRecord(cfg.Dir)
	if err != nil && !errdefs.Is(err, errdefs.NotFound) {
		return nil, err
	}
	if rec.Phase == Exited {
		return nil, lastWord(cfg.Dir)
	}
	return Start(ctx, cfg)
}

// spawn begins the process in a session of its own, and in the group if there is
// one, with nothing of ours but the environment. died is closed when it has ended.
func spawn(cfg StartConfig, group string) (died <-chan struct{}, err error) {
	log, err := os.OpenFile(filepath.Join(cfg.Dir, logFile), os.O_WRONLY|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "open log of monitor: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(cfg.Executable, cfg.Args...)
	cmd.Dir = "/"
	env := cfg.Env
	if env == nil {
		env = os.Environ()
	}
	cmd.Env = append(unmarked(env), monitorMark+"="+cfg.Dir)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if group != "" {
		folder, err := os.Open(group)
		if err != nil {
			return nil, fmt.Errorf("start monitor in its group: %w", err)
		}
		defer folder.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(folder.Fd())
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start monitor %q: %w", cfg.Executable, err)
	}
	done := make(chan struct{})
	// It is a child of ours until one of us ends; nobody else may wait for it.
	go func() {
		defer close(done)
		_ = cmd.Wait() // what it has to say is in its record and its log
	}()
	return done, nil
}

// lastWord is why the folder has no monitor: the failure in its record, the
// run's end, or the last line of the log.
func lastWord(dir string) error {
	rec, err := ReadRecord(dir)
	switch {
	case err == nil && rec.Failure != nil:
		return rec.Failure.Err()
	case err == nil && rec.Phase == Exited:
		return errdefs.New(errdefs.WrongState, "machine %s: its run %s has ended (%s); start it", nameOf(dir), rec.RunID, rec.Exit.Why())
	case err != nil && !errdefs.Is(err, errdefs.NotFound):
		return err
	case rec.Phase == "":
		if err := CheckLost(dir); err != nil {
			return err
		}
	}
	return errdefs.New(errdefs.Internal, "machine %s: its monitor died: %s", nameOf(dir), lastLine(filepath.Join(dir, logFile)))
}

// lastLine is the last line of the log that has something in it.
func lastLine(path string) string {
	const tail = 4 << 10
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err.Error()
	}
	buf := make([]byte, min(st.Size(), tail))
	n, err := f.ReadAt(buf, st.Size()-int64(len(buf)))
	if n < len(buf) {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(buf)), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return last
	}
	return fmt.Sprintf("it left nothing in %q", path)
}
