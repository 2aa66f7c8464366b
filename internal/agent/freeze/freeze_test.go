//go:build linux

package freeze

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// fake is a file system that notes what is done to it.
type fake struct {
	name string
	log  *log
	// slow is how long Freeze takes, fails its error.
	slow   time.Duration
	fails  error
	stolen bool
	frozen atomic.Bool
	closed int
}

type log struct {
	mu    sync.Mutex
	lines []string
}

func (l *log) add(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, line)
}

func (f *fake) Name() string { return f.name }
func (f *fake) Sync() error  { f.log.add("sync " + f.name); return nil }
func (f *fake) Close() error { f.closed++; return nil }

func (f *fake) Freeze() error {
	time.Sleep(f.slow) // in a bubble's time
	f.log.add("freeze " + f.name)
	f.frozen.Store(f.fails == nil)
	return f.fails
}

func (f *fake) Thaw() (bool, error) {
	f.log.add("thaw " + f.name)
	return f.frozen.Swap(false) && !f.stolen, nil
}

// bench is a freezer of two fakes.
func bench() (*Freezer, *log, *fake, *fake) {
	l := &log{}
	lower, upper := &fake{name: "/", log: l}, &fake{name: "/data", log: l}
	return New(Config{
		FileSystems: func() ([]FileSystem, error) { return []FileSystem{lower, upper}, nil },
		Hooks:       func(_ context.Context, verb string) error { l.add("hooks " + verb); return nil },
	}), l, lower, upper
}

func wantKind(t *testing.T, err error, kind errdefs.Kind) {
	t.Helper()
	if !errdefs.Is(err, kind) {
		t.Errorf("error %v, want %s", err, kind)
	}
}

func TestOrder(t *testing.T) {
	f, l, lower, upper := bench()
	z, err := f.Freeze(t.Context(), Order{Limit: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Freeze(t.Context(), Order{Limit: time.Second})
	wantKind(t, err, errdefs.Conflict)
	if _, err := z.Thaw(t.Context()); err != nil {
		t.Error(err)
	}
	want := []string{"hooks freeze", "sync /", "sync /data", "freeze /data", "freeze /", "thaw /", "thaw /data", "hooks thaw"}
	if !slices.Equal(l.lines, want) {
		t.Errorf("%q", l.lines)
	}
	if lower.closed != 1 || upper.closed != 1 {
		t.Error("closed", lower.closed, upper.closed)
	}
	if z, err = f.Freeze(t.Context(), Order{Limit: time.Second}); err != nil { // the next one
		t.Fatal(err)
	}
	_, _ = z.Thaw(t.Context())
}

func TestLimitThaws(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, lower, upper := bench()
		z, err := f.Freeze(t.Context(), Order{Limit: 2 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(2*time.Second - time.Nanosecond)
		synctest.Wait()
		if !lower.frozen.Load() || !upper.frozen.Load() {
			t.Error("thawed before the limit")
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if lower.frozen.Load() || upper.frozen.Load() {
			t.Error("frozen after the limit")
		}
		r, err := z.Thaw(t.Context())
		wantKind(t, err, errdefs.Deadline)
		if r.Frozen != 2*time.Second {
			t.Error(r.Frozen)
		}
	})
}

func TestSlowFreeze(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, l, lower, upper := bench()
		lower.slow = 3 * time.Second
		_, err := f.Freeze(t.Context(), Order{Limit: 2 * time.Second})
		wantKind(t, err, errdefs.Deadline)
		if lower.frozen.Load() || upper.frozen.Load() || lower.closed != 1 || upper.closed != 1 {
			t.Error("left")
		}
		if got := l.lines[len(l.lines)-1]; got != "hooks thaw" {
			t.Error(got)
		}
	})
}

func TestPartialFailure(t *testing.T) {
	f, _, lower, upper := bench()
	lower.fails = errdefs.New(errdefs.WrongState, "frozen already")
	_, err := f.Freeze(t.Context(), Order{Limit: time.Second})
	wantKind(t, err, errdefs.WrongState)
	if upper.frozen.Load() {
		t.Error("/data is left frozen")
	}
	lower.fails = nil
	z, err := f.Freeze(t.Context(), Order{Limit: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	upper.stolen = true
	_, err = z.Thaw(t.Context())
	wantKind(t, err, errdefs.Conflict)
	for _, limit := range []time.Duration{0, -1, MaxLimit + 1} {
		_, err := f.Freeze(t.Context(), Order{Limit: limit})
		wantKind(t, err, errdefs.Invalid)
	}
}

func TestHookFailure(t *testing.T) {
	f, l, _, _ := bench()
	f.cfg.Hooks = func(_ context.Context, verb string) error {
		l.add("hooks " + verb)
		return errors.New(verb + " failed")
	}
	if _, err := f.Freeze(t.Context(), Order{Limit: time.Second}); err == nil || err.Error() != "freeze failed" {
		t.Error(err)
	}
	if want := []string{"hooks freeze", "hooks thaw"}; !slices.Equal(l.lines, want) {
		t.Errorf("%q", l.lines)
	}
	z, err := f.Freeze(t.Context(), Order{Limit: time.Second, AllowHookFailure: true})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := z.Thaw(t.Context()); err != nil || r.Failed == nil || r.Failed.Error() != "freeze failed\nthaw failed" {
		t.Error(r.Failed, err)
	}
}

func TestCancelledBefore(t *testing.T) {
	f, l, _, _ := bench()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := f.Freeze(ctx, Order{Limit: time.Second}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if slices.Contains(l.lines, "freeze /") {
		t.Errorf("%q", l.lines)
	}
	if z, err := f.Freeze(t.Context(), Order{Limit: time.Second}); err != nil {
		t.Error(err)
	} else {
		_, _ = z.Thaw(t.Context())
	}
}

func TestHooks(t *testing.T) {
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"10-db": 0o755, "20-bad": 0o755, "30-late": 0o755, "README": 0o644} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), mode); err != nil {
			t.Fatal(err)
		}
	}
	var ran []string
	hooks := HooksIn(dir, func(_ context.Context, argv ...string) ([]byte, error) {
		ran = append(ran, filepath.Base(argv[0])+" "+argv[1])
		if strings.HasSuffix(argv[0], "20-bad") {
			return []byte("no\nthe database \xff is locked\n"), errors.New("exit status 1")
		}
		return nil, nil
	})
	err := hooks(t.Context(), "freeze")
	if err == nil || !strings.Contains(err.Error(), "20-bad freeze: exit status 1: the database ? is locked") {
		t.Error(err)
	}
	if want := []string{"10-db freeze", "20-bad freeze"}; !slices.Equal(ran, want) {
		t.Errorf("%q", ran)
	}
	ran = nil
	if err := hooks(t.Context(), "thaw"); err == nil {
		t.Error("no error")
	}
	if want := []string{"30-late thaw", "20-bad thaw", "10-db thaw"}; !slices.Equal(ran, want) {
		t.Errorf("%q", ran)
	}
	if err := HooksIn(filepath.Join(dir, "none"), nil)(t.Context(), "freeze"); err != nil {
		t.Error(err)
	}
}

func TestHookHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "hang"), nil, 0o755); err != nil {
			t.Fatal(err)
		}
		err := HooksIn(dir, func(ctx context.Context, _ ...string) ([]byte, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		})(t.Context(), "freeze")
		wantKind(t, err, errdefs.Deadline)
	})
}

// TestRealFileSystem freezes one on a loop device.
func TestRealFileSystem(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting wants root")
	}
	dir := t.TempDir()
	image, point := filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
	if err := os.Mkdir(point, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, argv := range [][]string{{"truncate", "-s", "16M", image}, {"mkfs.ext4", "-q", image}, {"mount", "-o", "loop", image, point}} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Skipf("%s: %v: %s", argv[0], err, out)
		}
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", point).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	f := New(Config{FileSystems: func() ([]FileSystem, error) {
		m, err := open(point)
		return []FileSystem{m}, err
	}})
	z, err := f.Freeze(t.Context(), Order{Limit: MaxLimit})
	if err != nil {
		t.Fatal(err)
	}
	again, err := open(point)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	wantKind(t, again.Freeze(), errdefs.WrongState)
	written := make(chan error, 1)
	go func() { written <- os.WriteFile(filepath.Join(point, "file"), []byte("x"), 0o600) }()
	select {
	case err := <-written:
		t.Error("written to a frozen file system", err)
	case <-time.After(100 * time.Millisecond): // that nothing happens takes its time
	}
	r, err := z.Thaw(t.Context())
	if err != nil || r.Frozen < 100*time.Millisecond {
		t.Error(r, err)
	}
	if err := <-written; err != nil {
		t.Error(err)
	}

	if z, err = f.Freeze(t.Context(), Order{Limit: MaxLimit}); err != nil {
		t.Fatal(err)
	}
	if was, err := again.Thaw(); !was || err != nil {
		t.Error(was, err)
	}
	_, err = z.Thaw(t.Context())
	wantKind(t, err, errdefs.Conflict)
}
