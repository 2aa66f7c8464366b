//go:build linux

// The guest of the boot tests: it loads the fixture's modules and does what
// each line on the agent's port says, with one line in answer.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	for dir, fs := range map[string]string{"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs"} {
		_ = os.Mkdir(dir, 0o755)
		_ = unix.Mount(fs, dir, fs, 0, "")
	}
	for _, list := range []string{"/holdpoint/modules", "/extra"} {
		load(list)
	}
	port, err := open()
	if err != nil {
		fmt.Println("guest:", err)
		select {}
	}
	fmt.Println("guest: ready")
	for {
		serve(port)
	}
}

func load(list string) {
	text, err := os.ReadFile(list)
	if err != nil {
		return
	}
	for _, path := range strings.Fields(string(text)) {
		f, err := os.Open(path)
		if err == nil {
			err = unix.FinitModule(int(f.Fd()), "", 0)
		}
		if err != nil {
			fmt.Println("guest: load", path, err)
		}
	}
}

// open opens the port for blocking reads. It must not be polled besides, as
// os.OpenFile would have it: poll takes what has come off the queue, after which
// its interrupt wakes nobody who reads (drivers/char/virtio_console.c).
func open() (*os.File, error) {
	names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
	for _, name := range names {
		if b, _ := os.ReadFile(name); string(bytes.TrimSpace(b)) == "holdpoint.agent" {
			port := "/dev/" + filepath.Base(filepath.Dir(name))
			fd, err := unix.Open(port, unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				return nil, fmt.Errorf("open %s: %w", port, err)
			}
			return os.NewFile(uintptr(fd), port), nil
		}
	}
	return nil, fmt.Errorf("no port among %v", names)
}

func serve(port *os.File) {
	poll := []unix.PollFd{{Fd: int32(port.Fd()), Events: unix.POLLIN}}
	r := bufio.NewReader(port)
	for {
		line, err := r.ReadString('\n')
		if err != nil { // nobody is connected
			_, _ = unix.Poll(poll, 50)
			return
		}
		fmt.Fprintln(port, do(strings.Fields(line)))
	}
}

func do(words []string) string {
	if len(words) == 0 {
		return ""
	}
	var err error
	answer := "ok"
	switch words[0] {
	case "ping":
		answer = "pong " + words[1]
	case "write": // offset in MiB, text
		err = write(words[1], words[2])
	case "read":
		answer, err = read(words[1])
	case "remember":
		memory = words[1]
	case "recall":
		answer = memory
	case "dirty": // pages to write to in each 10 ms
		go dirty(words[1])
	case "random":
		b, rerr := os.ReadFile("/sys/class/misc/hw_random/rng_current")
		answer, err = string(bytes.TrimSpace(b)), rerr
	case "poweroff":
		err = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	case "reboot":
		err = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	case "panic":
		err = os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0)
	}
	if err != nil {
		return "error " + err.Error()
	}
	return answer
}

// memory is what the host asked to remember.
var memory = "nothing"

func dirty(pages string) {
	var n int
	if _, err := fmt.Sscan(pages, &n); err != nil || n <= 0 {
		return
	}
	b := make([]byte, 64<<20)
	for at := 0; ; time.Sleep(10 * time.Millisecond) {
		for range n {
			b[at%len(b)]++
			at += 4096
		}
	}
}

func at(f *os.File, mib string) error {
	var n int64
	if _, err := fmt.Sscan(mib, &n); err != nil {
		return err
	}
	_, err := f.Seek(n<<20, io.SeekStart)
	return err
}

func write(mib, text string) error {
	f, err := os.OpenFile("/dev/vda", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := at(f, mib); err != nil {
		return err
	}
	if _, err := f.WriteString(text); err != nil {
		return err
	}
	return f.Sync()
}

func read(mib string) (string, error) {
	f, err := os.Open("/dev/vda")
	if err != nil {
		return "", err
	}
	defer f.Close()
	if err := at(f, mib); err != nil {
		return "", err
	}
	b := make([]byte, 64)
	_, err = io.ReadFull(f, b)
	return "text " + string(bytes.TrimRight(b, "\x00")), err
}
