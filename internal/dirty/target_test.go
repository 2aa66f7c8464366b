//go:build linux

package dirty

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const targetVariable = "HOLDPOINT_DIRTY_TARGET"

// The target's main goroutine is its main thread, into which we inject.
func init() {
	if os.Getenv(targetVariable) != "" {
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	if path := os.Getenv(targetVariable); path != "" {
		beTarget(path)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// beTarget maps a file privately and obeys lines on its standard input, for
// which the main thread waits in ppoll as QEMU's does.
func beTarget(path string) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(nil, err)
	st, err := f.Stat()
	must(nil, err)
	mem, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	must(nil, err)
	fmt.Println("ready")
	var sum byte
	defer runtime.KeepAlive(&sum)
	for {
		line := pollLine()
		words := strings.Fields(line)
		if len(words) == 0 {
			return
		}
		a := make([]int, 3)
		for i, w := range words[1:] {
			a[i], err = strconv.Atoi(w)
			must(nil, err)
		}
		switch words[0] {
		case "write": // page, count, value
			for p := a[0]; p < a[0]+a[1]; p++ {
				mem[p*PageSize+p%PageSize] = byte(a[2])
			}
		case "read":
			for p := a[0]; p < a[0]+a[1]; p++ {
				sum += mem[p*PageSize+7] // what it read is of no interest
			}
		case "load": // the kernel writes: read the file into a page
			_, err := unix.Pread(int(f.Fd()), mem[a[0]*PageSize:(a[0]+a[1])*PageSize], 0)
			must(nil, err)
		case "storm":
			clear(mem[:8]) // its count
			go storm(mem, int(f.Fd()))
		case "busy":
			fmt.Println("begun")
			fmt.Println(spin(a[0]))
			continue
		case "dumpable":
			must(nil, unix.Prctl(unix.PR_SET_DUMPABLE, uintptr(a[0]), 0, 0, 0))
		case "userfaultfd": // one of its own, on its memory
			fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, userfaultUserModeOnly, 0, 0)
			if errno != 0 {
				panic(errno)
			}
			u := &userfault{fd: int(fd), p: &process{segments: []segment{{start: address(mem), end: address(mem) + uint64(len(mem))}}}}
			must(nil, userfaultSetup(u.fd))
			must(nil, u.register())
		case "lose": // takes its memory out of the tracking of whoever has it
			must(nil, unix.Munmap(mem))
			mem, err = unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
			must(nil, err)
		default:
			panic(line)
		}
		fmt.Println("ok")
	}
}

func address(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(&mem[0]))) }

// spin computes with registers alone for n rounds, and makes no system call.
func spin(n int) uint64 {
	x, y := uint64(88172645463325252), uint64(362436069)
	for range n {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		y = y*6364136223846793005 + x
	}
	return x ^ y
}

// pollLine reads a line from standard input byte by byte, each awaited in
// ppoll with a timeout that the kernel has to keep over restarts.
func pollLine() string {
	var line []byte
	b := make([]byte, 1)
	fds := []unix.PollFd{{Fd: 0, Events: unix.POLLIN}}
	for {
		timeout := unix.Timespec{Sec: 60}
		n, err := unix.Ppoll(fds, &timeout, nil)
		if err == unix.EINTR {
			continue
		}
		must(nil, err)
		if n != 1 || fds[0].Revents == 0 {
			panic(fmt.Sprintf("ppoll: %d, %+v", n, fds[0]))
		}
		n, err = unix.Read(0, b)
		if n < 1 || err != nil || b[0] == '\n' {
			return string(line)
		}
		line = append(line, b[0])
	}
}

func must(t testing.TB, err error) {
	if err == nil {
		return
	}
	if t == nil {
		panic(err)
	}
	t.Helper()
	t.Fatal(err)
}

func ctxOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// target is a child process with a memory file.
type target struct {
	t   testing.TB
	cfg Config
	in  io.WriteCloser
	out *bufio.Reader
}

// targetFile is a file with content everywhere.
func targetFile(t testing.TB, pages int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "memory")
	content := make([]byte, pages*PageSize)
	for i := range content {
		content[i] = byte(i/PageSize + i)
	}
	must(t, os.WriteFile(path, content, 0o600))
	return path
}

func startTarget(t testing.TB, pages int) *target {
	t.Helper()
	path := targetFile(t, pages)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), targetVariable+"="+path)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	c := &target{t: t, in: in, out: bufio.NewReader(out)}
	c.cfg = Config{PID: cmd.Process.Pid, MemoryFile: path, MemoryBytes: int64(pages) * PageSize}
	t.Cleanup(func() {
		_ = in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("target: %v", err)
		}
	})
	c.await("ready")
	return c
}

func (c *target) await(want string) {
	c.t.Helper()
	line, err := c.out.ReadString('\n')
	if err != nil || strings.TrimSpace(line) != want {
		c.t.Fatalf("target said %q, %v; want %q", line, err, want)
	}
}

func (c *target) do(format string, args ...any) {
	c.t.Helper()
	_, err := fmt.Fprintf(c.in, format+"\n", args...)
	must(c.t, err)
	c.await("ok")
}

func (c *target) attach(s Strategy) *Tracker {
	c.t.Helper()
	cfg := c.cfg
	cfg.Strategy = s
	tr, err := Attach(ctxOf(c.t), cfg)
	must(c.t, err)
	c.t.Cleanup(func() { _ = tr.Close() })
	return tr
}

// requires skips on a host that has not got the strategy.
func requires(t testing.TB, s Strategy) {
	t.Helper()
	for _, have := range Probe() {
		if have.Strategy == s && !have.Available {
			t.Skipf("this host has no %s: %s", s, have.Reason)
		}
	}
}

// text is a set as "first+count …".
func text(s *Set) string {
	var runs []string
	for offset, length := range s.Runs() {
		runs = append(runs, fmt.Sprintf("%d+%d", offset/PageSize, length/PageSize))
	}
	return strings.Join(runs, " ")
}
