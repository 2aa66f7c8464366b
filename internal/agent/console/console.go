//go:build linux

// Package console offers a root shell on the guest's serial console, in guests
// where nothing else does: whoever can type there owns the machine. It knows
// nothing of who that is, or of the host.
package console

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/agent/command"
	"github.com/holdpoint/holdpoint/internal/shellwords"
)

// invitation is what an empty line is answered with before the shell. Who answers
// early has not been told the machine's name yet.
const invitation = "holdpoint: a root shell on the machine's console; exit ends it\r\n"

// againAfter is the least time between two shells, so that one that cannot run
// does not keep the CPU busy.
const againAfter = time.Second

// Config is what Attend works with.
type Config struct {
	Commands *command.Set
	Log      *slog.Logger
}

// Attend waits for Enter on the console, runs a login shell there, and begins
// again when that has ended. It returns when there is no console.
func Attend(cfg Config) {
	device, err := active()
	if err != nil {
		cfg.Log.Info("nothing attends the console", "error", err)
		return
	}
	for {
		if err := attend(cfg, device); err != nil {
			cfg.Log.Warn("the console is not attended any more", "device", device, "error", err)
			return
		}
		time.Sleep(againAfter)
	}
}

// active is the device behind the kernel's console: /dev/console itself can
// control no session (Documentation/admin-guide/serial-console.rst).
func active() (string, error) {
	b, err := os.ReadFile("/sys/class/tty/console/active")
	if err != nil {
		return "", err
	}
	names := strings.Fields(string(b))
	if len(names) == 0 {
		return "", fmt.Errorf("the kernel has no console")
	}
	return filepath.Join("/dev", names[len(names)-1]), nil
}

func attend(cfg Config, device string) error {
	tty, err := os.OpenFile(device, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	defer tty.Close()
	if err := sane(int(tty.Fd())); err != nil {
		return err
	}
	_, err = bufio.NewReaderSize(oneByte{tty}, 16).ReadString('\n')
	if errors.Is(err, io.EOF) {
		return nil // Ctrl-D, such as one more than ended the shell
	}
	if err != nil {
		return err
	}
	if _, err := io.WriteString(tty, invitation); err != nil {
		return err
	}
	child, err := cfg.Commands.Spawn(command.Spec{Argv: shellwords.LoginShell(), Env: []string{"TERM=vt220"}},
		&syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0}, tty, tty, tty)
	if err != nil {
		_, _ = fmt.Fprintf(tty, "holdpoint: no shell: %v\r\n", err)
		return nil
	}
	<-child.Done()
	return nil
}

// oneByte reads no more than was asked for: what is typed after Enter is the
// shell's.
type oneByte struct{ r io.Reader }

func (o oneByte) Read(p []byte) (int, error) { return o.r.Read(p[:min(1, len(p))]) }

// sane sets the terminal to lines with echo, whatever the last shell left.
func sane(fd int) error {
	t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return os.NewSyscallError("TCGETS", err)
	}
	t.Iflag = unix.ICRNL | unix.IXON
	t.Oflag = unix.OPOST | unix.ONLCR
	t.Lflag = unix.ICANON | unix.ECHO | unix.ECHOE | unix.ISIG | unix.IEXTEN
	return os.NewSyscallError("TCSETS", unix.IoctlSetTermios(fd, unix.TCSETS, t))
}
