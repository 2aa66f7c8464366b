package memory

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// records is a catalog of layers, in memory.
type records struct {
	mu     sync.Mutex
	layers map[string]catalog.Layer
	inUse  []string
	asked  func() // called when the files in use have been read
	fail   bool   // the files in use cannot be told
}

func (r *records) GetLayers(_ context.Context, ids ...string) ([]catalog.Layer, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []catalog.Layer
	for _, id := range ids {
		l, ok := r.layers[id]
		if !ok {
			return nil, errdefs.New(errdefs.NotFound, "find layer %s", id)
		}
		list = append(list, l)
	}
	return list, nil
}

func (r *records) MemoryFilesInUse(context.Context) ([]string, error) {
	r.mu.Lock()
	list, asked, fail := slices.Clone(r.inUse), r.asked, r.fail
	r.mu.Unlock()
	if fail {
		return nil, errors.New("no catalog")
	}
	if asked != nil {
		asked()
	}
	return list, nil
}

func (r *records) use(ids ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inUse = ids
}

// world is a home with layers and a cache.
type world struct {
	*Cache
	t       testing.TB
	home    *home.Home
	files   *durable.FS
	records *records
	below   map[int]int // of layers, by their numbers
}

// newWorld has a short path, as a home needs for its sockets.
func newWorld(t testing.TB) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "memory-")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return worldIn(t, dir)
}

func worldIn(t testing.TB, dir string) *world {
	t.Helper()
	h, err := home.Open(filepath.Join(dir, "home"))
	must(t, err)
	must(t, h.Create())
	w := &world{t: t, home: h, files: &durable.FS{}, records: &records{layers: map[string]catalog.Layer{}}, below: map[int]int{}}
	w.reopen("boot1", 0)
	return w
}

func (w *world) reopen(boot string, limit int64) {
	w.t.Helper()
	c, err := New(Config{Home: w.home, Files: w.files, Catalog: w.records, MaxBytes: limit, HostBoot: boot})
	must(w.t, err)
	w.Cache = c
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func id(n int) string { return fmt.Sprintf("%016x", n) }

func noise(seed uint64, pages int) []byte {
	b := make([]byte, pages*store.PageSize)
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	_, _ = rand.NewChaCha8(key).Read(b)
	return b
}

// layer writes the layer n, above the layer below unless that is 0, with the
// pages [first, first+count) of the memory.
func (w *world) layer(n, below int, memory []byte, first, count int64) {
	w.t.Helper()
	cfg := store.WriteConfig{
		ID: id(n), MemoryBytes: int64(len(memory)), Memory: bytes.NewReader(memory),
		Pages: func(yield func(int64, int64) bool) { yield(first*store.PageSize, count*store.PageSize) },
	}
	w.below[n] = below
	if below > 0 {
		cfg.Parent = id(below)
		var chain []string
		for l := below; l > 0; l = w.below[l] {
			chain = append([]string{id(l)}, chain...)
		}
		list, err := w.records.GetLayers(w.t.Context(), chain...)
		must(w.t, err)
		view, done, err := w.View(w.t.Context(), list)
		must(w.t, err)
		defer done()
		cfg.Previous = view
	}
	f, err := os.Create(w.home.MemoryLayer(id(n)))
	must(w.t, err)
	defer f.Close()
	sum, err := store.Write(w.t.Context(), f, cfg)
	must(w.t, err)
	path, err := filepath.Rel(w.home.Dir(), f.Name())
	must(w.t, err)
	w.records.mu.Lock()
	defer w.records.mu.Unlock()
	w.records.layers[id(n)] = catalog.Layer{
		ID: id(n), Path: filepath.ToSlash(path), Format: catalog.MemoryFormat, State: catalog.LayerSealed, Digest: sum.Digest.String(),
		VirtualBytes: int64(len(memory)),
	}
}

func full(layers ...int) checkpoint.Checkpoint {
	k := checkpoint.Checkpoint{ID: "00000000000000cc", Kind: checkpoint.Full, Full: &checkpoint.FullState{}}
	for _, n := range layers {
		k.Full.Memory = append(k.Full.Memory, id(n))
	}
	return k
}

func (w *world) open(k checkpoint.Checkpoint) (File, func()) {
	w.t.Helper()
	f, release, err := w.Open(w.t.Context(), k)
	must(w.t, err)
	return f, release
}

// names are the files of the cache.
func (w *world) names() string {
	w.t.Helper()
	entries, err := os.ReadDir(w.home.MemoryFiles())
	must(w.t, err)
	var names []string
	for _, e := range entries {
		if e.Name() != hostBootName {
			names = append(names, e.Name())
		}
	}
	return strings.Join(names, " ")
}

func (w *world) namesAre(want ...int) {
	w.t.Helper()
	var ids []string
	for _, n := range want {
		ids = append(ids, id(n))
	}
	if got := w.names(); got != strings.Join(ids, " ") {
		w.t.Errorf("files: %q, want %v", got, ids)
	}
}

func TestFileIsTheMemory(t *testing.T) {
	for _, layers := range []int{1, 60} {
		w := newWorld(t)
		const pages = 1000
		memory := make([]byte, pages*store.PageSize)
		var chain []int
		for n := range layers {
			first, count := int64(n*13%900), int64(100)
			if n == 0 {
				first, count = 0, pages
			}
			copy(memory[first*store.PageSize:], noise(uint64(n), int(count)))
			clear(memory[(first+3)*store.PageSize : (first+9)*store.PageSize])
			w.layer(n+1, n, memory, first, count)
			chain = append(chain, n+1)
		}
		f, release := w.open(full(chain...))
		got, err := os.ReadFile(f.Path)
		must(t, err)
		if !f.Made || !bytes.Equal(got, memory) {
			t.Errorf("%d layers: made %v, and the memory differs", layers, f.Made)
		}
		release()
		again, release := w.open(full(chain...))
		if again.Made || again.Path != f.Path {
			t.Errorf("opened again: %+v", again)
		}
		release()
		release() // twice does nothing

		list, err := w.records.GetLayers(t.Context(), full(chain...).Full.Memory...)
		must(t, err)
		view, done, err := w.View(t.Context(), list)
		must(t, err)
		seen := make([]byte, len(memory))
		_, err = view.ReadAt(seen, 0)
		must(t, err)
		done()
		if !bytes.Equal(seen, memory) {
			t.Errorf("%d layers: the view differs", layers)
		}
	}
}

func TestConcurrentOpensMakeItOnce(t *testing.T) {
	w := newWorld(t)
	w.layer(1, 0, noise(1, 500), 0, 500)
	var made, creates int
	var mu sync.Mutex
	w.files.Before = func(s durable.Step) error {
		mu.Lock()
		defer mu.Unlock()
		if s.Op == durable.OpCreate {
			creates++
		}
		return nil
	}
	var group sync.WaitGroup
	for range 16 {
		group.Go(func() {
			f, release, err := w.Open(t.Context(), full(1))
			if err != nil {
				t.Error(err)
				return
			}
			defer release()
			mu.Lock()
			defer mu.Unlock()
			if f.Made {
				made++
			}
		})
	}
	group.Wait()
	if made != 1 || creates != 1 {
		t.Errorf("made %d times, said so %d times", creates, made)
	}
	w.namesAre(1)
}

// TestNextInLineMakesIt: a waiter whose maker gave up makes it.
func TestNextInLineMakesIt(t *testing.T) {
	w := newWorld(t)
	w.layer(1, 0, noise(1, 500), 0, 500)
	ctx, cancel := context.WithCancel(t.Context())
	making := make(chan struct{})
	var once sync.Once
	w.files.Before = func(s durable.Step) error {
		if s.Op == durable.OpCreate {
			once.Do(func() {
				close(making)
				<-ctx.Done()
			})
		}
		return nil
	}
	failed := make(chan error)
	go func() {
		_, _, err := w.Open(ctx, full(1))
		failed <- err
	}()
	<-making
	impatient, stop := context.WithCancel(t.Context())
	stop()
	if _, _, err := w.Open(impatient, full(1)); !errors.Is(err, context.Canceled) {
		t.Errorf("a canceled waiter: %v", err)
	}
	second := make(chan File)
	go func() {
		f, release, err := w.Open(t.Context(), full(1))
		if err != nil {
			t.Error(err)
		} else {
			release()
		}
		second <- f
	}()
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Errorf("the canceled maker: %v", err)
	}
	if f := <-second; !f.Made {
		t.Errorf("the waiter got %+v", f)
	}
	w.namesAre(1)
}

// TestCrashAtAnyStep: after a crash the next daemon finds
// the whole file or none.
func TestCrashAtAnyStep(t *testing.T) {
	w := newWorld(t)
	memory := noise(1, 300)
	w.layer(1, 0, memory, 0, 300)
	for k := 0; ; k++ {
		steps := 0
		w.files.Before = func(durable.Step) error {
			if steps++; steps > k {
				return errors.New("crash")
			}
			return nil
		}
		_, _, err := w.Open(t.Context(), full(1))
		left := w.names()
		w.files.Before = nil
		if err == nil {
			if k < 2 {
				t.Errorf("only %d steps", k)
			}
			break
		}
		if slices.Contains(strings.Fields(left), id(1)) {
			t.Errorf("after %d steps: %s", k, left)
		}
		w.reopen("boot1", 0)
		w.namesAre()
	}
	f, release := w.open(full(1))
	defer release()
	got, err := os.ReadFile(f.Path)
	if must(t, err); !bytes.Equal(got, memory) {
		t.Error("the memory differs")
	}
}

func TestDamagedLayerIsNamed(t *testing.T) {
	memory := noise(1, 300)
	for name, damage := range map[string]func(w *world, path string){
		"a byte": func(w *world, path string) {
			b, err := os.ReadFile(path)
			must(t, err)
			b[5000]++
			must(t, os.WriteFile(path, b, 0o600))
		},
		"cut":     func(_ *world, path string) { must(t, os.Truncate(path, 5000)) },
		"missing": func(_ *world, path string) { must(t, os.Remove(path)) },
		"another": func(w *world, _ string) {
			w.layer(3, 2, memory, 0, 50) // as sound as the one recorded
			must(t, os.Rename(w.home.MemoryLayer(id(3)), w.home.MemoryLayer(id(2))))
		},
		"its like": func(w *world, _ string) {
			was := w.records.layers[id(2)]
			w.layer(2, 1, noise(9, 300), 0, 60)
			w.records.layers[id(2)] = was
		},
	} {
		w := newWorld(t)
		w.layer(1, 0, memory, 0, 300)
		w.layer(2, 1, noise(2, 300), 0, 50)
		damage(w, w.home.MemoryLayer(id(2)))
		_, _, err := w.Open(t.Context(), full(1, 2))
		if !errdefs.Is(err, errdefs.Storage) || !strings.Contains(err.Error(), id(2)) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
		w.namesAre()
		_, release := w.open(full(1)) // what does not need it is fine
		release()
	}
}

func TestWithoutMemory(t *testing.T) {
	w := newWorld(t)
	_, _, err := w.Open(t.Context(), checkpoint.Checkpoint{ID: "c1", Kind: checkpoint.Disk})
	if !errdefs.Is(err, errdefs.KindMismatch) {
		t.Errorf("a disk checkpoint: %v", err)
	}
	if _, _, err := w.Open(t.Context(), full(7)); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("an unknown layer: %v", err)
	}
	view, done, err := w.View(t.Context(), nil)
	if err != nil || view != nil {
		t.Errorf("a view of nothing: %v, %v", view, err)
	}
	done()
	must(t, os.Symlink("/etc/passwd", filepath.Join(w.home.MemoryFiles(), id(1))))
	w.layer(1, 0, noise(1, 10), 0, 10)
	if _, _, err := w.Open(t.Context(), full(1)); !errdefs.Is(err, errdefs.Storage) {
		t.Errorf("a symbolic link: %v", err)
	}
}

func TestLeastRecentlyUsedGoes(t *testing.T) {
	w := newWorld(t)
	const pages, each = 256, 256 * store.PageSize
	for n := 1; n <= 5; n++ {
		w.layer(n, 0, noise(uint64(n), pages), 0, pages)
		f, release := w.open(full(n))
		old := time.Now().Add(time.Duration(n-10) * time.Hour)
		must(t, os.Chtimes(f.Path, old, old))
		release()
	}
	_, release := w.open(full(1)) // used just now
	release()
	w.records.use(id(2)) // a run maps it
	_, held := w.open(full(3))
	must(t, os.Chtimes(filepath.Join(w.home.MemoryFiles(), id(3)), time.Time{}, time.Now().Add(-100*time.Hour)))
	w.cfg.MaxBytes = 4 * each
	must(t, w.Evict(t.Context()))
	w.namesAre(1, 2, 3, 5)
	w.cfg.MaxBytes = 1
	must(t, w.Evict(t.Context()))
	w.namesAre(2, 3)
	held()
	must(t, w.Evict(t.Context()))
	w.namesAre(2)
	w.records.use()
	must(t, w.Evict(t.Context()))
	w.namesAre()
}

func TestMakingAFileEvictsOthers(t *testing.T) {
	w := newWorld(t)
	w.cfg.MaxBytes = 1
	for n := 1; n <= 2; n++ {
		w.layer(n, 0, noise(uint64(n), 50), 0, 50)
	}
	_, first := w.open(full(1))
	_, second := w.open(full(2))
	w.namesAre(1, 2)
	w.records.use(id(1))
	first()
	w.namesAre(1, 2)
	second() // it was made, and nobody has recorded a run of it
	w.namesAre(1)
}

func TestFilesOfForgottenLayersGoFirst(t *testing.T) {
	w := newWorld(t)
	for n := 1; n <= 3; n++ {
		w.layer(n, 0, noise(uint64(n), 50), 0, 50)
		_, release := w.open(full(n))
		release()
	}
	delete(w.records.layers, id(2))
	delete(w.records.layers, id(3))
	w.records.use(id(3)) // its run goes on
	must(t, w.Evict(t.Context()))
	w.namesAre(1, 3)
}

// TestLateRecordsAreSpared: a run that is recorded after the
// catalog was asked, and its file released before that file's turn.
func TestLateRecordsAreSpared(t *testing.T) {
	w := newWorld(t)
	w.cfg.MaxBytes = 1
	w.layer(1, 0, noise(1, 50), 0, 50)
	w.records.use(id(1))
	_, release := w.open(full(1))
	release()
	w.records.use()
	_, release = w.open(full(1))
	asked := false
	w.records.asked = func() {
		asked = true
		w.records.use(id(1))
		release()
	}
	must(t, w.Evict(t.Context()))
	if !asked {
		t.Error("the catalog was not asked")
	}
	w.namesAre(1)
}

func TestHostBootTakesAll(t *testing.T) {
	w := newWorld(t)
	w.layer(1, 0, noise(1, 50), 0, 50)
	_, release := w.open(full(1))
	release()
	must(t, os.WriteFile(filepath.Join(w.home.MemoryFiles(), id(2)+"."+durable.NewID()+".tmp"), []byte("cut off"), 0o600))
	w.reopen("boot1", 0)
	w.namesAre(1)
	w.reopen("boot2", 0)
	w.namesAre()
	f, release := w.open(full(1))
	release()
	if !f.Made {
		t.Error("it was not made anew")
	}
	w.reopen("boot2", 0)
	w.namesAre(1)
	if _, err := New(Config{Home: w.home, Files: w.files, Catalog: w.records}); err != nil { // the kernel's own
		t.Error(err)
	}
}

func TestFullDisk(t *testing.T) {
	dir := small(t, "4m")
	w := worldIn(t, dir)
	for n := 1; n <= 3; n++ {
		memory := make([]byte, 400*store.PageSize) // 1.6 MB that compress well
		for i := range memory {
			memory[i] = byte(n + i%7)
		}
		w.layer(n, 0, memory, 0, 400)
	}
	_, first := w.open(full(1))
	_, second := w.open(full(2))
	_, _, err := w.Open(t.Context(), full(3))
	if !errdefs.Is(err, errdefs.NoSpace) {
		t.Fatalf("a third file: %v", err)
	}
	w.namesAre(1, 2)
	w.records.use(id(2))
	second()
	first()
	f, third := w.open(full(3)) // in the place of the one that nobody uses
	if !f.Made {
		t.Error("it was there")
	}
	w.namesAre(2, 3)
	third()
	if _, err := os.Stat(w.home.MemoryLayer(id(1))); errors.Is(err, fs.ErrNotExist) {
		t.Error("a layer went")
	}
}
