package main

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/agent"
)

const (
	// newRoot is where the root disk is mounted before it becomes the root.
	newRoot = "/newroot"
	// moduleList names the modules to load, one path in a line, in order.
	moduleList = "/holdpoint/modules"
	// portName is what the host calls the agent's virtio-serial port.
	portName = "holdpoint.agent"
	// deviceTimeout bounds the wait for the disk and the port. They are there
	// within milliseconds; a guest may be emulated on a busy host.
	deviceTimeout = 30 * time.Second
)

// boot is the way from the kernel's hand-over to the root disk.
type boot struct {
	begun time.Time
	log   *slog.Logger
	marks []string
	last  time.Time
}

// mark notes that a phase has ended.
func (b *boot) mark(phase string) {
	now := time.Now()
	since := b.last
	if since.IsZero() {
		since = b.begun
	}
	b.marks = append(b.marks, fmt.Sprintf("%s %dms", phase, now.Sub(since).Milliseconds()))
	b.last = now
}

func (b *boot) phases() string { return strings.Join(b.marks, ", ") }

// prepare mounts what the kernel offers and reads its command line.
func (b *boot) prepare() (agent.Params, error) {
	for _, m := range []mount{
		{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"},
		{"proc", "/proc", "proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"sysfs", "/sys", "sysfs", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"tmpfs", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755"},
	} {
		if err := m.mount(); err != nil {
			return agent.Params{}, err
		}
	}
	takeConsole()
	unix.Umask(0o022)
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return agent.Params{}, fmt.Errorf("read kernel command line: %w", err)
	}
	b.mark("mounts")
	return agent.ParseCmdline(string(line))
}

// takeConsole makes the console our standard input and output, whatever the
// kernel could open before /dev was there.
func takeConsole() {
	f, err := os.OpenFile("/dev/console", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return // a machine without a console
	}
	defer f.Close()
	for fd := range 3 {
		_ = unix.Dup3(int(f.Fd()), fd, 0)
	}
}

// devices loads the modules and waits for the disk and the agent port, whose
// path it returns.
func (b *boot) devices(disk string) (port string, err error) {
	events, err := openEvents()
	if err != nil {
		return "", err
	}
	defer events.close()
	if err := b.loadModules(); err != nil {
		return "", err
	}
	b.mark("modules")
	err = events.await(deviceTimeout, func() bool {
		port = findPort()
		_, serr := os.Stat(disk)
		return port != "" && serr == nil
	})
	if err != nil {
		return "", fmt.Errorf("wait for %s and the port %s: %w", disk, portName, err)
	}
	b.mark("devices")
	return port, nil
}

// loadModules loads what is listed and there; a kernel may have some built in.
func (b *boot) loadModules() error {
	list, err := os.Open(moduleList)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a kernel that has all built in
	}
	if err != nil {
		return fmt.Errorf("load modules: %w", err)
	}
	defer list.Close()
	lines := bufio.NewScanner(list)
	for lines.Scan() {
		name := strings.TrimSpace(lines.Text())
		if name == "" {
			continue
		}
		if err := loadModule(name); err != nil {
			b.log.Warn("load module", "module", name, "error", err)
		}
	}
	return lines.Err()
}

func loadModule(name string) error {
	f, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

// findPort finds the agent port by its name.
func findPort() string {
	names, _ := filepath.Glob("/sys/class/virtio-ports/*/name") // the pattern is right
	for _, name := range names {
		if b, err := os.ReadFile(name); err == nil && strings.TrimSpace(string(b)) == portName {
			dev := "/dev/" + filepath.Base(filepath.Dir(name))
			if _, err := os.Stat(dev); err == nil {
				return dev
			}
		}
	}
	return ""
}

// root mounts the root disk, lets it fill its device, and makes it the root.
func (b *boot) root(disk string) error {
	if err := (mount{disk, newRoot, "ext4", 0, ""}).mount(); err != nil {
		return err
	}
	b.mark("root disk")
	if grown, err := grow(disk, newRoot); err != nil {
		b.log.Warn("the root file system stays smaller than its disk", "error", err)
	} else if grown {
		b.mark("grow")
	}
	for _, dir := range []string{"/dev", "/proc", "/sys", "/run"} {
		if err := os.MkdirAll(newRoot+dir, 0o755); err != nil {
			return fmt.Errorf("switch root: %w", err)
		}
		if err := unix.Mount(dir, newRoot+dir, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("switch root: move %s: %w", dir, err)
		}
	}
	freeInitramfs()
	if err := os.Chdir(newRoot); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	b.mark("switch root")
	return nil
}

// freeInitramfs gives the memory of the initramfs back. This program's own
// file stays until it ends, it only has no name any more. What is mounted is
// not entered.
func freeInitramfs() {
	var top unix.Stat_t
	if unix.Lstat("/", &top) != nil {
		return
	}
	list, err := os.ReadDir("/")
	if err != nil {
		return
	}
	for _, e := range list {
		var st unix.Stat_t
		name := "/" + e.Name()
		if unix.Lstat(name, &st) == nil && st.Dev == top.Dev && name != newRoot {
			_ = os.RemoveAll(name) // what stays only costs memory
		}
	}
}
