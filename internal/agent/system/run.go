//go:build linux

package system

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/agent/command"
)

// memoryShort keeps systemd from ending all in init.scope, this process and its
// commands, when the kernel has ended one of them for want of memory.
const memoryShort = "[Scope]\nOOMPolicy=continue\n"

// consoleLogin lets who attends the console in: Enter gives a root shell, as
// beside no systemd. Whoever types there owns the machine.
const consoleLogin = `[Service]
ExecStart=
ExecStart=-/sbin/agetty --autologin root --wait-cr --noclear --keep-baud 115200,57600,38400,9600 - $TERM
`

// temporaryFiles stands for the distribution's file of that name: what is in
// /tmp stays there at boot, and however old it is.
const temporaryFiles = "d /tmp 1777 root root -\nd /var/tmp 1777 root root -\n"

// layOut writes what systemd is to find below run, which is /run: units and
// settings there go before the distribution's and after the administrator's.
func layOut(run string, onBoot *command.Spec) error {
	units := filepath.Join(run, "systemd/system")
	files := map[string]string{
		filepath.Join(units, "init.scope.d/holdpoint.conf"):            memoryShort,
		filepath.Join(run, "tmpfiles.d/tmp.conf"):                      temporaryFiles,
		filepath.Join(units, "serial-getty@.service.d/holdpoint.conf"): consoleLogin,
	}
	links := map[string]string{filepath.Join(units, "tmp.mount"): os.DevNull} // masks it
	if onBoot != nil {
		files[filepath.Join(units, "holdpoint-on-boot.service")] = onBootUnit(*onBoot)
		links[filepath.Join(units, "multi-user.target.wants/holdpoint-on-boot.service")] = "../holdpoint-on-boot.service"
	}
	for path, text := range files {
		if err := write(path, func() error { return os.WriteFile(path, []byte(text), 0o644) }); err != nil {
			return err
		}
	}
	for path, target := range links {
		if err := write(path, func() error { return os.Symlink(target, path) }); err != nil {
			return err
		}
	}
	return nil
}

func write(path string, write func() error) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("prepare /run for systemd: %w", err)
	}
	if err := write(); err != nil {
		return fmt.Errorf("prepare /run for systemd: %w", err)
	}
	return nil
}

// AwaitReady waits until systemd takes orders, so that systemctl works.
func (s *System) AwaitReady(ctx context.Context) error {
	return awaitBus(ctx, "/run/systemd", "private")
}

// awaitBus waits until there is a socket in a folder at which D-Bus is spoken: it is
// there long before somebody serves it.
func awaitBus(ctx context.Context, dir, name string) error {
	if err := awaitFile(ctx, dir, name); err != nil {
		return err
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", filepath.Join(dir, name))
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	// As root, see "Authentication Protocol" in the D-Bus specification. Whatever
	// the answer is, somebody gives it.
	if _, err := conn.Write([]byte("\x00AUTH EXTERNAL 30\r\n")); err != nil {
		return err
	}
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	return nil
}

// awaitFile waits until a folder has an entry.
func awaitFile(ctx context.Context, dir, name string) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return os.NewSyscallError("inotify_init1", err)
	}
	events := os.NewFile(uintptr(fd), "inotify")
	defer events.Close()
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_CREATE|unix.IN_MOVED_TO); err != nil {
		return fmt.Errorf("watch %s: %w", dir, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = events.Close() })
	defer stop()
	var buf [4096]byte
	for {
		_, err := os.Lstat(filepath.Join(dir, name))
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if _, err := events.Read(buf[:]); err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

// KeepJournal lets the journal that was written under one machine id be found under
// another one: journald goes on writing where it began, and journalctl looks for
// the id that the machine has now.
func KeepJournal(root, before, now string) error {
	for _, dir := range []string{"var/log/journal", "run/log/journal"} {
		path := filepath.Join(root, dir)
		if _, err := os.Lstat(filepath.Join(path, before)); err != nil {
			continue // none is kept there
		}
		if err := os.Symlink(before, filepath.Join(path, now)); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("keep the journal: %w", err)
		}
	}
	return nil
}
