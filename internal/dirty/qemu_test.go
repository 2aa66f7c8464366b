//go:build linux

package dirty

import (
	"bufio"
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/dirty/inject"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/qmp"
	"github.com/holdpoint/holdpoint/internal/store"
)

// vm is a QEMU that we started with its guest stopped before the first instruction.
type vm struct {
	t       testing.TB
	cfg     Config
	client  *qmp.Client
	console *bufio.Reader
}

func startQEMU(t testing.TB, mib int, extra ...string) *vm {
	t.Helper()
	binary, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		t.Skip("no qemu-system-x86_64")
	}
	dir, err := os.MkdirTemp("", "dirty") // its name has to be short enough for a socket
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	memory, socket := filepath.Join(dir, "memory"), filepath.Join(dir, "qmp")
	must(t, os.WriteFile(memory, nil, 0o600))
	must(t, os.Truncate(memory, int64(mib)<<20))
	args := []string{
		"-nodefaults", "-no-user-config", "-S", "-display", "none", "-accel", "tcg", "-cpu", "max", "-smp", "2",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-M", "q35,memory-backend=ram", "-m", fmt.Sprintf("%dM", mib),
		"-object", fmt.Sprintf("memory-backend-file,id=ram,size=%dM,mem-path=%s,share=off", mib, memory),
		"-qmp", "unix:" + socket + ",server=on,wait=off",
		"-serial", "stdio",
	}
	cmd := exec.Command(binary, append(args, extra...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	_, err = cmd.StdinPipe() // held open, so that QEMU's console sees no end
	must(t, err)
	must(t, cmd.Start())
	v := &vm{t: t, console: bufio.NewReader(out)}
	v.cfg = Config{PID: cmd.Process.Pid, MemoryFile: memory, MemoryBytes: int64(mib) << 20}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	ctx := ctxOf(t)
	for {
		if v.client, err = qmp.Dial(ctx, socket); err == nil {
			break
		}
		must(t, ctx.Err())
		time.Sleep(5 * time.Millisecond)
	}
	t.Cleanup(func() { _ = v.client.Close() })
	return v
}

func (v *vm) execute(command string) {
	v.t.Helper()
	must(v.t, v.client.Execute(ctxOf(v.t), command, nil, nil))
}

func (v *vm) await(text string) {
	v.t.Helper()
	for {
		line, err := v.console.ReadString('\n')
		must(v.t, err)
		if strings.Contains(line, "guest: failed") {
			v.t.Fatal(line)
		}
		if strings.Contains(line, text) {
			return
		}
	}
}

func (v *vm) attach(s Strategy) *Tracker {
	v.t.Helper()
	cfg := v.cfg
	cfg.Strategy = s
	tr, err := Attach(ctxOf(v.t), cfg)
	must(v.t, err)
	v.t.Cleanup(func() { _ = tr.Close() })
	return tr
}

// shadow is a copy of the memory made of the file and what was reported.
type shadow []byte

func newShadow(t testing.TB, cfg Config) shadow {
	t.Helper()
	b, err := os.ReadFile(cfg.MemoryFile)
	must(t, err)
	return b
}

// copy brings the pages of a set over.
func (s shadow) copy(t testing.TB, tr *Tracker, set *Set) {
	t.Helper()
	for offset, length := range set.Runs() {
		_, err := tr.ReadAt(s[offset:offset+length], offset)
		must(t, err)
	}
}

// compare checks every byte against the process's memory.
func (s shadow) compare(t testing.TB, what string, tr *Tracker) {
	t.Helper()
	got := make([]byte, len(s))
	_, err := tr.ReadAt(got, 0)
	must(t, err)
	missed := 0
	for p := 0; p < len(s); p += PageSize {
		if !bytes.Equal(got[p:p+PageSize], s[p:p+PageSize]) {
			if missed == 0 {
				t.Errorf("%s: page %d differs", what, p/PageSize)
			}
			missed++
		}
	}
	if missed > 0 {
		t.Errorf("%s: %d pages of %d differ", what, missed, len(s)/PageSize)
	}
}

// TestQEMUBIOS: the firmware writes a little memory and then waits for ever.
func TestQEMUBIOS(t *testing.T) {
	for _, s := range []Strategy{Userfaultfd, SoftDirty, Untracked} {
		t.Run(string(s), func(t *testing.T) {
			requires(t, s)
			v := startQEMU(t, 64)
			tr := v.attach(s)
			sh := newShadow(t, v.cfg)
			set, err := tr.Arm()
			must(t, err)
			t.Logf("before the first instruction: %d pages", set.Len())
			sh.copy(t, tr, set)
			sh.compare(t, "armed", tr)
			for range 3 {
				v.execute("cont")
				time.Sleep(100 * time.Millisecond)
				v.execute("stop")
				set, err = tr.Scan()
				must(t, err)
				t.Logf("written: %d pages", set.Len())
				sh.copy(t, tr, set)
				sh.compare(t, "stopped", tr)
			}
			n, err := ReadOnly(ctxOf(t), v.cfg)
			if n < 1 || err != nil {
				t.Errorf("made %d descriptors read-only, %v", n, err)
			}
			v.execute("system_reset")
			v.execute("cont")
			time.Sleep(100 * time.Millisecond)
			v.execute("stop")
			set, err = tr.Scan()
			must(t, err)
			sh.copy(t, tr, set)
			sh.compare(t, "after a reset", tr)
		})
	}
}

// TestQEMULinux holds tracked and untracked memory against each other, under
// a guest that writes memory and reads its disk all the time.
func TestQEMULinux(t *testing.T) {
	requires(t, Userfaultfd)
	v := startLinux(t, 256, nil)
	tr := v.attach(Userfaultfd)
	sh := newShadow(t, v.cfg)
	set, err := tr.Arm()
	must(t, err)
	sh.copy(t, tr, set)
	v.execute("cont")
	v.await("guest: ready")
	if n, err := ReadOnly(ctxOf(t), v.cfg); n < 1 || err != nil {
		t.Errorf("made %d descriptors read-only, %v", n, err)
	}
	for round := range 10 {
		for range 3 { // while the guest runs
			set, err := tr.Scan()
			must(t, err)
			sh.copy(t, tr, set)
			time.Sleep(30 * time.Millisecond)
		}
		v.execute("stop")
		set, err := tr.Scan()
		must(t, err)
		sh.copy(t, tr, set)
		sh.compare(t, fmt.Sprintf("round %d", round), tr)
		if set, err = tr.Scan(); err != nil || set.Len() != 0 {
			t.Errorf("a stopped guest wrote %v, %v", set, err)
		}
		v.execute("cont")
	}

	// A successor finds the tracking and all private pages.
	must(t, tr.Close())
	next := v.attach(Userfaultfd)
	private, err := next.Arm() // while the guest runs
	must(t, err)
	full := newShadow(t, v.cfg)
	full.copy(t, next, private)
	v.execute("stop")
	set, err = next.Scan()
	must(t, err)
	full.copy(t, next, set)
	full.compare(t, "armed while running", next)
	private, err = next.Arm()
	must(t, err)
	full = newShadow(t, v.cfg)
	full.copy(t, next, private)
	full.compare(t, "untracked", next)
	layers := addLayer(t, v, next, private)
	v.execute("cont")
	time.Sleep(50 * time.Millisecond)
	v.execute("stop")
	set, err = next.Scan()
	must(t, err)
	t.Logf("%d pages are private, %d were written in 50 ms", private.Len(), set.Len())
	full.copy(t, next, set)
	full.compare(t, "after arming again", next)
	if private.Len() == 0 || set.Len() == 0 {
		t.Error("the guest wrote nothing")
	}
	layers = addLayer(t, v, next, set, layers...)
	checkLayers(t, v, next, layers)
	file := newShadow(t, v.cfg)
	if bytes.ContainsFunc(file, func(r rune) bool { return r != 0 }) {
		t.Error("the memory file was written to")
	}
	v.execute("cont")
}

// addLayer stores pages of a stopped guest in a layer above others.
func addLayer(t *testing.T, v *vm, tr *Tracker, set *Set, layers ...*store.Layer) []*store.Layer {
	t.Helper()
	view, err := store.NewView(nil, v.cfg.MemoryBytes, layers...)
	must(t, err)
	cfg := store.WriteConfig{ID: durable.NewID(), MemoryBytes: v.cfg.MemoryBytes, Pages: set.Runs(), Memory: tr, Previous: view}
	if len(layers) > 0 {
		cfg.Parent = layers[len(layers)-1].Info().ID
	}
	f, err := os.Create(filepath.Join(t.TempDir(), cfg.ID))
	must(t, err)
	start := time.Now()
	sum, err := store.Write(ctxOf(t), f, cfg)
	must(t, err)
	must(t, f.Close())
	t.Logf("layer of %d bytes in %v, pages: %d data, %d zero, %d same", sum.Bytes, time.Since(start), sum.DataPages, sum.ZeroPages, sum.SamePages)
	l, err := store.Open(f.Name())
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return append(layers, l)
}

// checkLayers compares what layers make with the memory of the stopped guest.
func checkLayers(t *testing.T, v *vm, tr *Tracker, layers []*store.Layer) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "memory")
	must(t, store.Materialize(ctxOf(t), store.MaterializeConfig{Path: path, MemoryBytes: v.cfg.MemoryBytes, Layers: layers}))
	made, err := os.ReadFile(path)
	must(t, err)
	shadow(made).compare(t, "layers", tr)
}

// TestOtherKernel runs this package's tests inside a guest whose kernel may
// have another strategy than the host's: Debian 12's has soft-dirty bits and
// no PAGEMAP_SCAN.
func TestOtherKernel(t *testing.T) {
	program := filepath.Join(t.TempDir(), "dirty.test")
	build := exec.Command("go", "test", "-c", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build tests: %v\n%s", err, out)
	}
	code, err := os.ReadFile(program)
	must(t, err)
	v := startLinux(t, 512, newc("dirty.test", code))
	v.execute("cont")
	for {
		line, err := v.console.ReadString('\n')
		must(t, err)
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "===") && !strings.Contains(line, "[rapid]") {
			t.Log(line)
		}
		if result, ok := strings.CutPrefix(line, "guest: tests ended: "); ok {
			if result != "<nil>" {
				t.Error(result)
			}
			return
		}
	}
}

// startLinux starts a guest with our program as its init and what else is in
// the archive extra.
func startLinux(t testing.TB, mib int, extra []byte) *vm {
	t.Helper()
	image := os.Getenv("HOLDPOINT_TEST_IMAGE")
	if image == "" {
		t.Skip("HOLDPOINT_TEST_IMAGE names no folder with a kernel and an initramfs")
	}
	dir := t.TempDir()
	modules, err := os.ReadFile(filepath.Join(image, "initramfs"))
	if os.IsNotExist(err) {
		modules, err = os.ReadFile(filepath.Join(image, "initramfs-modules.cpio"))
	}
	must(t, err)
	program := filepath.Join(dir, "guest")
	build := exec.Command("go", "build", "-o", program, "./testdata/guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build guest: %v\n%s", err, out)
	}
	code, err := os.ReadFile(program)
	must(t, err)
	initramfs := filepath.Join(dir, "initramfs")
	// Later archives replace what earlier ones hold.
	archive := append(append([]byte(nil), modules...), make([]byte, -len(modules)&3)...)
	must(t, os.WriteFile(initramfs, append(archive, append(newc("init", code), extra...)...), 0o600))
	disk := filepath.Join(dir, "disk")
	content := make([]byte, 32<<20)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(content)
	must(t, os.WriteFile(disk, content, 0o600))
	return startQEMU(t, mib,
		"-drive", "if=none,id=d,format=raw,cache=writeback,aio=threads,file="+disk,
		"-device", "virtio-blk-pci,drive=d",
		"-kernel", filepath.Join(image, "kernel"), "-initrd", initramfs,
		"-append", "console=ttyS0 quiet cryptomgr.notests rdinit=/init panic=-1")
}

// newc is a cpio archive of one executable.
func newc(name string, data []byte) []byte {
	var b bytes.Buffer
	entry := func(name string, mode int, data []byte) {
		fmt.Fprintf(&b, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
			0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0, name)
		b.Write(make([]byte, -b.Len()&3))
		b.Write(data)
		b.Write(make([]byte, -b.Len()&3))
	}
	entry(name, 0o100755, data)
	entry("TRAILER!!!", 0, nil)
	return b.Bytes()
}

// TestNotDumpable: a process that hides from us is refused and goes on.
func TestNotDumpable(t *testing.T) {
	if os.Getuid() == 0 {
		c := startTarget(t, 10)
		c.do("dumpable 0")
		// Root may look into it all the same; nothing must break.
		tr := c.attach("")
		if _, err := tr.Arm(); err != nil {
			t.Error(err)
		}
		c.do("write 1 1 1")
		return
	}
	c := startTarget(t, 10)
	c.do("dumpable 0")
	if _, err := Attach(ctxOf(t), c.cfg); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("attach: %v", err)
	}
	c.do("write 1 1 1")
}

// BenchmarkUserfaultfd gives the figures of the package comment, for a
// process with 512 MiB.
func BenchmarkUserfaultfd(b *testing.B) {
	requires(b, Userfaultfd)
	const pages = 512 << 20 / PageSize
	c := startTarget(b, pages)
	b.Run("inject", func(b *testing.B) {
		for b.Loop() {
			must(b, inject.Do(ctxOf(b), c.cfg.PID, func(s *inject.Session) error {
				_, err := s.Call(unix.SYS_GETPID)
				return err
			}))
		}
	})
	b.Run("attach-again", func(b *testing.B) {
		for b.Loop() {
			must(b, c.attach(Userfaultfd).Close())
		}
	})
	tr := c.attach(Userfaultfd)
	b.Run("arm-untouched", func(b *testing.B) {
		for b.Loop() {
			_, err := tr.Arm()
			must(b, err)
		}
	})
	b.Run("scan-nothing", func(b *testing.B) {
		for b.Loop() {
			_, err := tr.Scan()
			must(b, err)
		}
	})
	for _, n := range []int{256, 2048} {
		b.Run(fmt.Sprintf("scan-%d-scattered", n), func(b *testing.B) {
			buf := make([]byte, PageSize)
			var scans, copies time.Duration
			for b.Loop() {
				b.StopTimer()
				for i := range n {
					_, err := fmt.Fprintf(c.in, "write %d 1 3\n", i*(pages/n))
					must(b, err)
					c.await("ok")
				}
				b.StartTimer()
				start := time.Now()
				set, err := tr.Scan()
				must(b, err)
				scans += time.Since(start)
				start = time.Now()
				for offset, length := range set.Runs() {
					_, err := tr.ReadAt(buf[:min(length, PageSize)], offset)
					must(b, err)
				}
				copies += time.Since(start)
			}
			b.ReportMetric(float64(scans.Microseconds())/float64(b.N), "scan-µs")
			b.ReportMetric(float64(copies.Microseconds())/float64(b.N), "copy-µs")
		})
	}
	c.do("write 0 %d 1", pages)
	_, err := tr.Scan()
	must(b, err)
	b.Run("scan-nothing-all-private", func(b *testing.B) {
		for b.Loop() {
			_, err := tr.Scan()
			must(b, err)
		}
	})
	b.Run("arm-all-private", func(b *testing.B) {
		for b.Loop() {
			_, err := tr.Arm()
			must(b, err)
		}
	})
}
