//go:build linux

package dirty

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/dirty/inject"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// each runs a test with each strategy that the host has.
func each(t *testing.T, pages int, test func(t *testing.T, c *target, tr *Tracker)) {
	for _, s := range []Strategy{Userfaultfd, SoftDirty, Untracked} {
		t.Run(string(s), func(t *testing.T) {
			requires(t, s)
			c := startTarget(t, pages)
			test(t, c, c.attach(s))
		})
	}
}

func armed(t *testing.T, tr *Tracker) string {
	t.Helper()
	set, err := tr.Arm()
	must(t, err)
	return text(set)
}

func scan(t *testing.T, tr *Tracker) string {
	t.Helper()
	set, err := tr.Scan()
	must(t, err)
	return text(set)
}

func want(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: pages %q, want %q", what, got, want)
	}
}

func TestWritesAreReportedAndReadsAreNot(t *testing.T) {
	each(t, 1000, func(t *testing.T, c *target, tr *Tracker) {
		c.do("write 3 2 1")
		c.do("read 100 50")
		want(t, "arm", armed(t, tr), "3+2")
		all := tr.Strategy() == Untracked // which reports what was before, too
		pick := func(tracked, untracked string) string {
			if all {
				return untracked
			}
			return tracked
		}
		want(t, "nothing", scan(t, tr), pick("", "3+2"))
		c.do("read 0 1000")
		want(t, "reads", scan(t, tr), pick("", "3+2"))
		c.do("write 4 1 2")
		c.do("write 63 3 2")
		c.do("write 999 1 2")
		c.do("write 0 1 2")
		want(t, "writes", scan(t, tr), pick("0+1 4+1 63+3 999+1", "0+1 3+2 63+3 999+1"))
		want(t, "nothing again", scan(t, tr), pick("", "0+1 3+2 63+3 999+1"))
		c.do("load 200 10")
		want(t, "writes of the kernel", scan(t, tr), pick("200+10", "0+1 3+2 63+3 200+10 999+1"))
		c.do("write 200 1 9")
		want(t, "arm again", armed(t, tr), "0+1 3+2 63+3 200+10 999+1")
		want(t, "nothing after that", scan(t, tr), pick("", "0+1 3+2 63+3 200+10 999+1"))
		c.do("write 500 400 9")
		want(t, "many", scan(t, tr), pick("500+400", "0+1 3+2 63+3 200+10 500+400 999+1"))
	})
}

func TestManyRuns(t *testing.T) {
	// More runs than one PAGEMAP_SCAN call returns.
	const pages = 3 * regionsPerCall
	each(t, pages, func(t *testing.T, c *target, tr *Tracker) {
		armed(t, tr)
		var runs []string
		for p := 1; p < pages; p += 2 {
			runs = append(runs, fmt.Sprintf("%d+1", p))
			_, err := fmt.Fprintf(c.in, "write %d 1 7\n", p)
			must(t, err)
			c.await("ok")
		}
		if got := scan(t, tr); got != strings.Join(runs, " ") {
			t.Error("not each second page was reported")
		}
		if tr.Strategy() != Untracked {
			want(t, "again", scan(t, tr), "")
		}
	})
}

func TestReadAt(t *testing.T) {
	each(t, 100, func(t *testing.T, c *target, tr *Tracker) {
		armed(t, tr)
		c.do("write 10 1 77")
		expect, err := os.ReadFile(c.cfg.MemoryFile)
		must(t, err)
		expect[10*PageSize+10] = 77
		got := make([]byte, len(expect))
		if _, err := tr.ReadAt(got, 0); err != nil || !bytes.Equal(got, expect) {
			t.Errorf("the memory is not what was written (%v)", err)
		}
		n, err := tr.ReadAt(got[:8192], 99*PageSize+5)
		if n != PageSize-5 || !errors.Is(err, io.EOF) || !bytes.Equal(got[:n], expect[99*PageSize+5:]) {
			t.Errorf("read over the end: %d, %v", n, err)
		}
		want(t, "scan", scan(t, tr), "10+1")
	})
}

func TestPrivatePagesBothWays(t *testing.T) {
	c := startTarget(t, 5000)
	c.do("read 0 5000")
	c.do("write 17 1000 1")
	c.do("write 4999 1 1")
	p, err := openProcess(c.cfg)
	must(t, err)
	defer p.close()
	a, b := NewSet(p.size), NewSet(p.size)
	must(t, p.entries(isPrivate, a.Add))
	want(t, "pagemap", text(a), "17+1000 4999+1")
	must(t, p.private(b.Add))
	want(t, "private", text(b), text(a))
}

func TestSuccessorFindsTheUserfaultfd(t *testing.T) {
	requires(t, Userfaultfd)
	c := startTarget(t, 200)
	first := c.attach(Userfaultfd)
	armed(t, first)
	c.do("write 5 1 1")
	must(t, first.Close())
	if _, err := first.Scan(); !errdefs.Is(err, errdefs.WrongState) {
		t.Errorf("scan after close: %v", err)
	}
	c.do("write 6 1 1")
	next := c.attach(Userfaultfd)
	if _, err := next.Scan(); !errdefs.Is(err, errdefs.WrongState) {
		t.Errorf("scan before arm: %v", err)
	}
	c.do("write 7 1 1")
	want(t, "arm", armed(t, next), "5+3")
	c.do("write 100 1 1")
	want(t, "scan", scan(t, next), "100+1")
	links, err := next.p.descriptors()
	must(t, err)
	n := 0
	for _, link := range links {
		if link == userfaultLink {
			n++
		}
	}
	if n != 1 {
		t.Errorf("the target has %d userfaultfds", n)
	}
	cfg := c.cfg
	for _, s := range []Strategy{Untracked, SoftDirty} {
		cfg.Strategy = s
		tr, err := Attach(ctxOf(t), cfg)
		if err == nil {
			_, err = tr.Arm()
			_ = tr.Close()
		}
		if !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("%s beside a userfaultfd: %v", s, err)
		}
	}
}

func TestAnotherUserfaultfdHoldsTheMemory(t *testing.T) {
	requires(t, Userfaultfd)
	c := startTarget(t, 200)
	c.do("userfaultfd")
	// It is taken over, as that of a dead predecessor is: one that is set up
	// like ours cannot be told apart.
	tr := c.attach(Userfaultfd)
	armed(t, tr)
	c.do("write 1 1 1")
	want(t, "scan", scan(t, tr), "1+1")

	// A second one is refused and closed again.
	before, err := tr.p.descriptors()
	must(t, err)
	_, err = create(ctxOf(t), tr.p)
	if !errors.Is(err, unix.EBUSY) || !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("second userfaultfd: %v (kind %s)", err, errdefs.KindOf(err))
	}
	after, err := tr.p.descriptors()
	must(t, err)
	if len(after) != len(before) {
		t.Errorf("descriptors of the target: %v, then %v", before, after)
	}
	c.do("write 2 1 1")
	want(t, "scan", scan(t, tr), "2+1")
}

func TestLostMappingIsAnError(t *testing.T) {
	requires(t, Userfaultfd)
	c := startTarget(t, 200)
	tr := c.attach(Userfaultfd)
	armed(t, tr)
	c.do("lose")
	if set, err := tr.Scan(); err == nil {
		t.Errorf("scan of a mapping that is not tracked: %q", text(set))
	}
	if _, err := tr.Scan(); !errdefs.Is(err, errdefs.WrongState) {
		t.Errorf("scan after a failed one: %v", err)
	}
}

// TestInjectionIntoABusyThread: the thread is in no system call, gets Go's
// preemption signals, and must not notice.
func TestInjectionIntoABusyThread(t *testing.T) {
	c := startTarget(t, 10)
	const rounds = 60_000_000
	_, err := fmt.Fprintf(c.in, "busy %d\n", rounds)
	must(t, err)
	c.await("begun")
	n, result := 0, make(chan string, 1)
	go func() {
		line, _ := c.out.ReadString('\n')
		result <- strings.TrimSpace(line)
	}()
	for {
		err := inject.Do(ctxOf(t), c.cfg.PID, func(s *inject.Session) error {
			pid, err := s.Call(unix.SYS_GETPID)
			if err == nil && pid != c.cfg.PID {
				err = fmt.Errorf("getpid gave %d", pid)
			}
			return err
		})
		must(t, err)
		n++
		select {
		case got := <-result:
			if want := fmt.Sprint(spin(rounds)); got != want {
				t.Errorf("after %d injections the target computed %s, want %s", n, got, want)
			}
			if n < 3 {
				t.Errorf("only %d injections while it was busy", n)
			}
			return
		case <-time.After(time.Millisecond):
		}
	}
}

func TestInjectionIntoASleepingThread(t *testing.T) {
	c := startTarget(t, 10)
	for range 50 {
		must(t, inject.Do(ctxOf(t), c.cfg.PID, func(s *inject.Session) error {
			return s.WithString("/proc/self/nowhere", func(path uint64) error {
				at := unix.AT_FDCWD
				if _, err := s.Call(unix.SYS_OPENAT, uint64(at), path, 0, 0); !errors.Is(err, unix.ENOENT) {
					return fmt.Errorf("open: %v", err)
				}
				return nil
			})
		}))
		c.do("write 1 1 1")
	}
}

func TestInjectionIsRefused(t *testing.T) {
	t.Run("stopped", func(t *testing.T) {
		c := startTarget(t, 10)
		must(t, unix.Kill(c.cfg.PID, unix.SIGSTOP))
		awaitState(t, c.cfg.PID, 'T')
		err := inject.Do(ctxOf(t), c.cfg.PID, func(*inject.Session) error { return nil })
		if !errdefs.Is(err, errdefs.WrongState) {
			t.Errorf("inject into a stopped process: %v", err)
		}
		must(t, unix.Kill(c.cfg.PID, unix.SIGCONT))
		c.do("write 1 1 1")
	})
	t.Run("gone", func(t *testing.T) {
		c := startTarget(t, 10)
		tr := c.attach(Untracked)
		must(t, c.in.Close())
		_, err := c.out.ReadString('\n')
		if err == nil {
			t.Fatal("target goes on")
		}
		awaitState(t, c.cfg.PID, 'Z')
		err = inject.Do(ctxOf(t), c.cfg.PID, func(*inject.Session) error { return nil })
		if !errors.Is(err, unix.EPERM) && !errdefs.Is(err, errdefs.WrongState) {
			t.Errorf("inject: %v", err)
		}
		if _, err := tr.Arm(); !errdefs.Is(err, errdefs.WrongState) {
			t.Errorf("arm: %v", err)
		}
		if _, err := tr.ReadAt(make([]byte, 10), 0); !errdefs.Is(err, errdefs.WrongState) {
			t.Errorf("read: %v", err)
		}
	})
	t.Run("canceled", func(t *testing.T) {
		c := startTarget(t, 10)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for range 20 {
			err := inject.Do(ctx, c.cfg.PID, func(*inject.Session) error { return nil })
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			c.do("write 1 1 1")
		}
	})
}

// awaitState waits for the main thread's state in /proc/PID/stat.
func awaitState(t *testing.T, pid int, state byte) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		must(t, err)
		if i := bytes.LastIndexByte(b, ')'); b[i+2] == state {
			return
		}
	}
	t.Fatalf("process %d is not in state %c", pid, state)
}

// TestForeignProcess: as another user, who may not look into our target.
func TestForeignProcess(t *testing.T) {
	if v := os.Getenv("HOLDPOINT_DIRTY_FOREIGN"); v != "" {
		var cfg Config
		_, err := fmt.Sscanf(v, "%d %d %s", &cfg.PID, &cfg.MemoryBytes, &cfg.MemoryFile)
		must(t, err)
		_, err = Attach(ctxOf(t), cfg)
		if !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "ptrace_scope") {
			t.Errorf("attach: %v (kind %s)", err, errdefs.KindOf(err))
		}
		if err := inject.Do(ctxOf(t), cfg.PID, nil); !errors.Is(err, unix.EPERM) {
			t.Errorf("inject: %v", err)
		}
		return
	}
	if os.Getuid() != 0 {
		t.Skip("needs root, to become somebody else")
	}
	c := startTarget(t, 10)
	exe, err := os.CreateTemp("", "foreign")
	must(t, err)
	defer os.Remove(exe.Name())
	self, err := os.ReadFile("/proc/self/exe")
	must(t, err)
	_, err = exe.Write(self)
	must(t, err)
	must(t, exe.Chmod(0o755))
	must(t, exe.Close())
	cmd := exec.Command(exe.Name(), "-test.run=^TestForeignProcess$", "-test.v")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), fmt.Sprintf("HOLDPOINT_DIRTY_FOREIGN=%d %d %s", c.cfg.PID, c.cfg.MemoryBytes, c.cfg.MemoryFile))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: TestForeignProcess")) {
		t.Errorf("%v\n%s", err, out)
	}
	c.do("write 1 1 1")
}

func TestReadOnly(t *testing.T) {
	c := startTarget(t, 100)
	c.do("write 5 1 3")
	n, err := ReadOnly(ctxOf(t), c.cfg)
	if n != 1 || err != nil {
		t.Fatalf("replaced %d descriptors, %v", n, err)
	}
	p, err := openProcess(c.cfg)
	must(t, err)
	defer p.close()
	links, err := p.descriptors()
	must(t, err)
	found := false
	for fd, link := range links {
		if link != c.cfg.MemoryFile {
			continue
		}
		found = true
		own, err := p.fetch(fd)
		must(t, err)
		if _, err := unix.Pwrite(own, []byte("x"), 0); !errors.Is(err, unix.EBADF) {
			t.Errorf("write through descriptor %d: %v", fd, err)
		}
		if err := unix.Fallocate(own, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, PageSize); !errors.Is(err, unix.EBADF) {
			t.Errorf("punch a hole through descriptor %d: %v", fd, err)
		}
		must(t, unix.Close(own))
	}
	if !found || len(links) == 0 {
		t.Errorf("the descriptor is gone: %v", links)
	}
	c.do("write 6 1 3")
	c.do("load 7 1")
	if n, err := ReadOnly(ctxOf(t), c.cfg); n != 0 || err != nil {
		t.Errorf("a second time: %d, %v", n, err)
	}
}

func TestBadMemory(t *testing.T) {
	c := startTarget(t, 100)
	cfg := c.cfg
	cfg.MemoryBytes /= 2
	if _, err := Attach(ctxOf(t), cfg); err == nil {
		t.Error("attached with a wrong size")
	}
	cfg.MemoryBytes++
	if _, err := Attach(ctxOf(t), cfg); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("attached with half a page: %v", err)
	}
	cfg = c.cfg
	cfg.MemoryFile = targetFile(t, 100)
	if _, err := Attach(ctxOf(t), cfg); err == nil {
		t.Error("attached with a file that is not mapped")
	}
	cfg = c.cfg
	cfg.Strategy = "magic"
	if _, err := Attach(ctxOf(t), cfg); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("attached with magic: %v", err)
	}
}

// TestRemovedMemoryFile: the process keeps a file that was removed, also when
// another has its path by now.
func TestRemovedMemoryFile(t *testing.T) {
	c := startTarget(t, 100)
	must(t, os.Remove(c.cfg.MemoryFile))
	for _, again := range []bool{false, true} {
		if again {
			must(t, os.WriteFile(c.cfg.MemoryFile, make([]byte, 100*PageSize), 0o600))
		}
		tr, err := Attach(ctxOf(t), c.cfg)
		if err != nil {
			t.Fatalf("attach, another file at its path %v: %v", again, err)
		}
		c.do("write 10 1 77")
		got := make([]byte, PageSize)
		if _, err := tr.ReadAt(got, 10*PageSize); err != nil || got[10] != 77 {
			t.Errorf("read %d, %v; want 77", got[10], err)
		}
		must(t, tr.Close())
	}
}

func TestCovering(t *testing.T) {
	for _, c := range []struct {
		segments []segment
		ok       bool
	}{
		{[]segment{{0x1000, 0x5000, 0}}, true},
		{[]segment{{0x9000, 0xb000, 0x2000}, {0x1000, 0x3000, 0}}, true},
		{[]segment{{0x1000, 0x4000, 0}}, false},
		{[]segment{{0x1000, 0x5000, 0}, {0x8000, 0xc000, 0}}, false},
		{[]segment{{0x1000, 0x5000, 0x1000}}, false},
		{nil, false},
	} {
		got, err := covering(c.segments, 0x4000, "f")
		if (err == nil) != c.ok {
			t.Errorf("%v: %v, %v", c.segments, got, err)
		}
	}
}

func TestCheckScope(t *testing.T) {
	with, without := "CapEff:\t0000000000080000\n", "CapEff:\t0000000000000000\n"
	for _, c := range []struct {
		scope, status string
		ok            bool
	}{
		{"0", without, true},
		{"1", without, true},
		{"2", without, false},
		{"2", with, true},
		{"3", with, false},
	} {
		if err := checkScope(c.scope, c.status); (err == nil) != c.ok || (err != nil && !errdefs.Is(err, errdefs.Unsupported)) {
			t.Errorf("scope %s: %v", c.scope, err)
		}
	}
}

func TestProbe(t *testing.T) {
	all := Probe()
	for _, s := range all {
		t.Logf("%s: %v %s", s.Strategy, s.Available, s.Reason)
		if s.Available == (s.Reason != "") {
			t.Errorf("%+v", s)
		}
	}
	if len(all) != 3 || !all[2].Available {
		t.Errorf("%+v", all)
	}
	var name unix.Utsname
	must(t, unix.Uname(&name))
	var major, minor int
	_, err := fmt.Sscanf(string(name.Release[:]), "%d.%d", &major, &minor)
	must(t, err)
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, userfaultUserModeOnly, 0, 0)
	if errno == 0 {
		must(t, unix.Close(int(fd)))
	}
	// Or else all tests of it would be skipped without a word.
	if recent := major > 6 || major == 6 && minor >= 7; recent && errno == 0 && runtime.GOARCH == "amd64" && !all[0].Available {
		t.Errorf("no userfaultfd on Linux %d.%d", major, minor)
	}
	if got := Best([]Support{{Strategy: Userfaultfd}, {Strategy: SoftDirty, Available: true}}); got != SoftDirty {
		t.Errorf("best is %s", got)
	}
}
