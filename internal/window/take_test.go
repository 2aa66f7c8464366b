//go:build linux

package window_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/dirty/book"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/window"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	page        = dirty.PageSize
	memoryPages = 8192 // 32 MiB
)

// guest is a run with its memory: content is what the guest has written, and
// whatever is called leaves a line.
type guest struct {
	strategy dirty.Strategy
	content  []byte
	mine     *dirty.Set // since its memory file
	written  *dirty.Set // since the last look
	running  bool
	switched bool
	calls    []string
	// fail names the call that fails, and how.
	fail  string
	cause error
	// before is called before each call, with its name.
	before func(call string)
	// slow is how long a read of 1 MiB takes.
	slow time.Duration
}

func newGuest(s dirty.Strategy) *guest {
	const size = memoryPages * page
	return &guest{strategy: s, content: make([]byte, size), mine: dirty.NewSet(size), written: dirty.NewSet(size), running: true, cause: errors.New("it does not work")}
}

// write has the guest change pages.
func (g *guest) write(first, count int64, b byte) {
	for i := first * page; i < (first+count)*page; i += page {
		g.content[i] = b
	}
	g.mine.Add(first, count)
	g.written.Add(first, count)
}

func (g *guest) call(format string, args ...any) error {
	line := fmt.Sprintf(format, args...)
	name, _, _ := strings.Cut(line, " ")
	if g.before != nil {
		g.before(name)
	}
	g.calls = append(g.calls, line)
	if g.fail == name {
		return g.cause
	}
	return nil
}

func (g *guest) Pause(context.Context) error {
	g.running = false
	return g.call("pause")
}

func (g *guest) Resume(context.Context) error {
	g.running = true
	return g.call("resume")
}

func (g *guest) Window(ctx context.Context, w machine.Window) (times machine.WindowTimes, err error) {
	if err := g.call("window stay=%t was=%t", w.StayPaused, w.WasPaused); err != nil {
		return times, err
	}
	g.running = false
	defer func() {
		if !w.WasPaused && (err != nil || !w.StayPaused) {
			g.running = true
		}
	}()
	if err := g.call("stop"); err != nil {
		return times, err
	}
	if err := w.Pages(ctx); err != nil {
		return times, err
	}
	if _, err := w.State.WriteString("devices"); err != nil {
		return times, err
	}
	if err := g.call("switch %s", w.Top.ID); err != nil {
		return times, err
	}
	g.switched = true
	return machine.WindowTimes{Downtime: time.Millisecond}, g.call("cont")
}

func (g *guest) Strategy() dirty.Strategy { return g.strategy }

func (g *guest) still() {
	if g.running && !g.strategy.Live() {
		panic("looked at while it runs")
	}
}

func (g *guest) Arm() (*dirty.Set, error) {
	g.still()
	g.written = dirty.NewSet(memoryPages * page)
	return g.mine.Clone(), g.call("arm %d", g.mine.Len())
}

func (g *guest) Scan() (*dirty.Set, error) {
	g.still()
	if g.before != nil {
		g.before("look")
	}
	set := g.written
	g.written = dirty.NewSet(memoryPages * page)
	if g.strategy == dirty.Untracked {
		set = g.mine.Clone()
	}
	return set, g.call("scan %d", set.Len())
}

func (g *guest) ReadAt(b []byte, off int64) (int, error) {
	time.Sleep(time.Duration(float64(g.slow) * float64(len(b)) / (1 << 20)))
	if g.fail == "read" || (g.fail == "read-still" && !g.running) {
		return 0, g.cause
	}
	if off+int64(len(b)) > int64(len(g.content)) {
		return 0, io.EOF
	}
	return copy(b, g.content[off:]), nil
}

func (g *guest) Close() error { return nil }

// config is how windows are opened on g.
func config(t *testing.T, g *guest, book *book.Book) window.Config {
	return window.Config{
		Run: g, Memory: g, MemoryBytes: memoryPages * page, Book: book, Dir: t.TempDir(),
		Top:      &machine.Layer{ID: "next"},
		SyncDisk: func(context.Context) error { return g.call("sync") },
		Enter:    func(context.Context) (bool, error) { was := !g.running; return was, g.call("enter") },
		Closed:   func(machine.WindowTimes) { _ = g.call("closed") },
	}
}

func newBook() *book.Book { return book.New("run", "", memoryPages*page) }

// check compares what is in the folder with the guest's memory.
func check(t *testing.T, g *guest, dir string, pages int64) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "pages"))
	if err != nil {
		t.Fatal(err)
	}
	var set dirty.Set
	if err := set.UnmarshalBinary(b); err != nil {
		t.Fatal(err)
	}
	if set.Len() != pages {
		t.Errorf("%d pages, want %d", set.Len(), pages)
	}
	memory, err := os.Open(filepath.Join(dir, "memory"))
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	if st, err := memory.Stat(); err != nil || st.Size() != int64(len(g.content)) {
		t.Fatal(st.Size(), err)
	}
	for offset, length := range set.Runs() {
		got := make([]byte, length)
		if _, err := memory.ReadAt(got, offset); err != nil || !bytes.Equal(got, g.content[offset:offset+length]) {
			t.Errorf("memory differs at %#x+%#x: %v", offset, length, err)
		}
	}
	if devices, _ := os.ReadFile(filepath.Join(dir, "devices")); string(devices) != "devices" {
		t.Errorf("devices %q", devices)
	}
}

func wantCalls(t *testing.T, g *guest, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, g.calls); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	g.calls = nil
}

func TestOrderOfTrackedWindows(t *testing.T) {
	g, book := newGuest(dirty.Userfaultfd), newBook()
	g.write(0, 3000, 1)
	g.before = func(call string) {
		switch call {
		case "enter":
			g.write(5000, 2, 7) // after the last look
		case "stop":
			g.write(6000, 1, 8) // just before it stands still
		}
	}
	cfg := config(t, g, book)
	r, err := window.Take(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	wantCalls(t, g, "sync", "arm 3000", "scan 0", "sync", "enter", "window stay=false was=false", "stop", "scan 3", "switch next", "cont", "closed")
	check(t, g, cfg.Dir, 3003)
	if r.Pages != 3003 || r.Rounds != 1 || r.PrecopiedBytes != 3000*page || r.WindowBytes != 3*page {
		t.Errorf("%+v", r)
	}
	if err := r.Capture.Publish("k1"); err != nil {
		t.Fatal(err)
	}

	// The next one has only what was written since.
	g.before = nil
	g.write(10, 5, 9)
	cfg.Dir = t.TempDir()
	r, err = window.Take(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	wantCalls(t, g, "sync", "scan 5", "scan 0", "sync", "enter", "window stay=false was=false", "stop", "scan 0", "switch next", "cont", "closed")
	check(t, g, cfg.Dir, 5)

	// Abandoned, its pages are in the one after it, as they are then.
	r.Capture.Abandon()
	g.write(12, 1, 11)
	g.write(20, 1, 11)
	cfg.Dir = t.TempDir()
	if r, err = window.Take(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	check(t, g, cfg.Dir, 6)
}

// TestGuestThatWritesFaster than it is copied gets three rounds.
func TestGuestThatWritesFaster(t *testing.T) {
	g := newGuest(dirty.Userfaultfd)
	g.write(0, 8000, 1)
	b := byte(1)
	g.before = func(call string) {
		if call == "look" {
			b++
			g.write(100, 4000, b)
		}
	}
	cfg := config(t, g, newBook())
	r, err := window.Take(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if r.Rounds != 3 || r.WindowBytes != 4000*page {
		t.Errorf("%+v", r)
	}
	check(t, g, cfg.Dir, 8000)
}

func TestOrderWhereTrackingNeedsPauses(t *testing.T) {
	g := newGuest(dirty.SoftDirty)
	g.write(0, 3000, 1)
	cfg := config(t, g, newBook())
	if _, err := window.Take(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	wantCalls(t, g, "enter", "sync", "pause", "arm 3000", "resume", "pause", "scan 0", "resume", "sync",
		"window stay=false was=false", "stop", "scan 0", "switch next", "cont", "closed")
	check(t, g, cfg.Dir, 3000)

	g = newGuest(dirty.Untracked)
	g.write(0, 3000, 1)
	cfg = config(t, g, newBook())
	r, err := window.Take(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	wantCalls(t, g, "enter", "sync", "pause", "arm 3000", "resume", "pause", "scan 3000", "resume", "sync",
		"window stay=false was=false", "stop", "scan 3000", "switch next", "cont", "closed")
	if r.WindowBytes != 3000*page {
		t.Errorf("%+v", r)
	}
	check(t, g, cfg.Dir, 3000)

	// A guest that stands still is not let go.
	g = newGuest(dirty.SoftDirty)
	g.running = false
	g.write(0, 3, 1)
	cfg = config(t, g, newBook())
	if _, err := window.Take(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	wantCalls(t, g, "enter", "sync", "arm 3", "scan 0", "sync", "window stay=false was=true", "stop", "scan 0", "switch next", "cont", "closed")
	if g.running {
		t.Error("the guest was let go")
	}
}

func TestStayPaused(t *testing.T) {
	g := newGuest(dirty.Userfaultfd)
	cfg := config(t, g, newBook())
	cfg.StayPaused = true
	if _, err := window.Take(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if g.running {
		t.Error("the guest runs")
	}
}

// TestEveryFailureLetsTheGuestGo and leaves nothing, for each call that can
// fail and each strategy.
func TestEveryFailureLetsTheGuestGo(t *testing.T) {
	calls := []string{"enter", "sync", "pause", "arm", "scan", "read", "read-still", "window", "stop", "switch", "cont"}
	for _, strategy := range []dirty.Strategy{dirty.Userfaultfd, dirty.SoftDirty, dirty.Untracked} {
		for _, call := range calls {
			for _, stay := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s %s stay=%t", strategy, call, stay), func(t *testing.T) {
					testFailure(t, strategy, call, stay)
				})
			}
		}
	}
}

func testFailure(t *testing.T, strategy dirty.Strategy, call string, stay bool) {
	g, book := newGuest(strategy), newBook()
	g.write(0, 100, 1)
	g.before = func(now string) {
		if now == "stop" {
			g.write(200, 1, 3) // so that there is something to read
		}
	}
	g.fail = call
	cfg := config(t, g, book)
	cfg.StayPaused = stay
	_, err := window.Take(t.Context(), cfg)
	if call == "pause" && strategy.Live() {
		if err != nil {
			t.Error(err) // it is not called
		}
		return
	}
	if !errors.Is(err, g.cause) || !g.running {
		t.Errorf("error %v, running %t", err, g.running)
	}
	if left, _ := os.ReadDir(cfg.Dir); len(left) > 0 {
		t.Errorf("left in the folder: %v", left)
	}
	if slices.Contains(g.calls, "closed") {
		t.Error("the window was said to have closed")
	}
	// The next one has everything.
	g.fail, g.before = "", nil
	g.write(300, 1, 5)
	if _, err := window.Take(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	check(t, g, cfg.Dir, g.mine.Len())
}

func TestGuestThatCannotBeLetGoIsUnknown(t *testing.T) {
	g := newGuest(dirty.SoftDirty)
	g.fail = "resume"
	if _, err := window.Take(t.Context(), config(t, g, newBook())); !errdefs.Is(err, errdefs.OutcomeUnknown) {
		t.Error(err)
	}
	g = newGuest(dirty.SoftDirty)
	g.fail, g.cause = "resume", errdefs.New(errdefs.WrongState, "it has ended")
	g.before = func(call string) {
		if call == "arm" {
			g.fail = "resume"
		}
	}
	if _, err := window.Take(t.Context(), config(t, g, newBook())); errdefs.Is(err, errdefs.OutcomeUnknown) {
		t.Error(err) // what has ended is known
	}
}

// TestFilesThatCannotBeCompleted: a guest that was to stay paused is let go.
func TestFilesThatCannotBeCompleted(t *testing.T) {
	g := newGuest(dirty.Userfaultfd)
	cfg := config(t, g, newBook())
	cfg.StayPaused = true
	cfg.Closed = func(machine.WindowTimes) {
		if err := os.MkdirAll(filepath.Join(cfg.Dir, "pages", "x"), 0o700); err != nil {
			t.Error(err)
		}
	}
	if _, err := window.Take(t.Context(), cfg); !errdefs.Is(err, errdefs.Storage) || !g.running {
		t.Errorf("error %v, running %t", err, g.running)
	}
}

func TestRefusals(t *testing.T) {
	g := newGuest(dirty.Userfaultfd)
	g.write(0, 4000, 1)
	cfg := config(t, g, newBook())
	cfg.Free = func(string) (int64, error) { return 20 << 20, nil }
	_, err := window.Take(t.Context(), cfg)
	if !errdefs.Is(err, errdefs.NoSpace) || !strings.Contains(err.Error(), "31 MiB are needed, 20 MiB are free") {
		t.Error(err)
	}
	wantCalls(t, g, "sync", "arm 4000")

	// 160 MiB/s, and 16 MiB left each time: 0.1 s.
	g = newGuest(dirty.Userfaultfd)
	g.slow = time.Second / 160
	g.before = func(string) { g.write(0, 4096, 1) }
	cfg = config(t, g, newBook())
	cfg.Deadline = 50 * time.Millisecond
	_, err = window.Take(t.Context(), cfg)
	if !errdefs.Is(err, errdefs.Deadline) || !strings.Contains(err.Error(), "MiB/s") || slices.Contains(g.calls, "enter") {
		t.Error(err, g.calls)
	}

	// Canceled before it opens, it does not.
	g = newGuest(dirty.Userfaultfd)
	ctx, cancel := context.WithCancel(t.Context())
	g.before = func(call string) {
		if call == "scan" {
			cancel()
		}
	}
	if _, err = window.Take(ctx, config(t, g, newBook())); !errors.Is(err, context.Canceled) || slices.Contains(g.calls, "enter") {
		t.Error(err, g.calls)
	}
}

// TestDeadlineEndsTheCopy of a guest that came to write fast in the end.
func TestDeadlineEndsTheCopy(t *testing.T) {
	g := newGuest(dirty.Userfaultfd)
	g.before = func(call string) {
		if call == "stop" {
			g.slow = time.Second / 16
			g.write(0, 4096, 1)
		}
	}
	cfg := config(t, g, newBook())
	cfg.Deadline = 50 * time.Millisecond
	began := time.Now()
	if _, err := window.Take(t.Context(), cfg); !errdefs.Is(err, errdefs.Deadline) || !g.running || time.Since(began) > time.Second {
		t.Error(err, g.running, time.Since(began))
	}
}

func TestBaseAndWhole(t *testing.T) {
	g := newGuest(dirty.Userfaultfd)
	g.content[7000*page] = 5 // of the memory file
	g.write(1, 2, 1)
	cfg := config(t, g, newBook())
	cfg.Base = dirty.NewSet(memoryPages * page)
	cfg.Base.Add(7000, 10)
	r, err := window.Take(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	check(t, g, cfg.Dir, 12)
	r.Capture.Abandon()

	cfg.Whole, cfg.Rebase = true, true
	if _, err = window.Take(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	check(t, g, cfg.Dir, memoryPages)
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(cfg.Dir, "memory"), &st); err != nil {
		t.Fatal(err)
	}
	if st.Blocks*512 > 1<<20 {
		t.Errorf("the file has %d KiB", st.Blocks/2)
	}
}

func TestOneAtATime(t *testing.T) {
	g, book := newGuest(dirty.Userfaultfd), newBook()
	if _, err := window.Take(t.Context(), config(t, g, book)); err != nil {
		t.Fatal(err)
	}
	g.calls = nil
	if _, err := window.Take(t.Context(), config(t, g, book)); !errdefs.Is(err, errdefs.MachineBusy) {
		t.Error(err)
	}
	wantCalls(t, g)
}
