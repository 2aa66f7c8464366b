package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"
)

// maxLog is the size in bytes from which a new daemon begins a new log; the
// one before is kept.
const maxLog = 8 << 20

// lock takes the lock of the file at path and waits for it. flock(2) can wait
// too, but could not be called off.
func lock(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil // nothing was written
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			_ = f.Close() // the first error says more
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			_ = f.Close() // nothing was written
			return nil, ctx.Err()
		case <-ticker.C:
		}
	}
}

// spawn starts command in a session of its own, with its output going to log,
// and waits for its announcement. The process outlives us.
func spawn(ctx context.Context, command []string, log string) (pid int, err error) {
	if info, err := os.Lstat(log); err == nil && info.Size() > maxLog {
		if err := os.Rename(log, log+".1"); err != nil {
			return 0, fmt.Errorf("put the daemon's log aside: %w", err)
		}
	}
	out, err := os.OpenFile(log, os.O_WRONLY|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return 0, fmt.Errorf("open the daemon's log: %w", err)
	}
	defer out.Close()
	ready, announce, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer ready.Close()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), readyVar+"=3")
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = out, out
	cmd.ExtraFiles = []*os.File{announce}
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	err = cmd.Start()
	_ = announce.Close() // the child has its own
	if err != nil {
		return 0, fmt.Errorf("start the daemon: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = ready.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := readAnnouncement(ready, log); err != nil {
		return 0, err
	}
	pid = cmd.Process.Pid
	return pid, cmd.Process.Release()
}

func closeOnExec(fd int) { unix.CloseOnExec(fd) }
