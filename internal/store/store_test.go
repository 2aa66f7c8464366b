package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type fataler interface {
	Helper()
	Fatal(...any)
}

func must(t fataler, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ids are layer ids by number; 0 is none.
func id(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("%016x", n)
}

func runsOf(runs ...[2]int64) iter.Seq2[int64, int64] {
	return func(yield func(int64, int64) bool) {
		for _, r := range runs {
			if !yield(r[0]*PageSize, r[1]*PageSize) {
				return
			}
		}
	}
}

// file writes a layer to disk and opens it.
func file(t testing.TB, cfg WriteConfig) (*Layer, Summary) {
	t.Helper()
	path := filepath.Join(t.TempDir(), cfg.ID)
	f, err := os.Create(path)
	must(t, err)
	sum, err := Write(t.Context(), f, cfg)
	must(t, err)
	must(t, f.Close())
	l, err := Open(path)
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l, sum
}

// noise fills pages with something that does not compress.
func noise(seed uint64, pages int) []byte {
	b := make([]byte, pages*PageSize)
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	_, _ = rand.NewChaCha8(key).Read(b)
	return b
}

func TestChainsAgainstAPlainMemory(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		pages := rapid.IntRange(1, 400).Draw(t, "pages")
		size := int64(pages) * PageSize
		memory := make([]byte, size)
		var layers []*Layer
		defer func() {
			for _, l := range layers {
				_ = l.Close()
			}
		}()
		for n := range rapid.IntRange(1, 5).Draw(t, "layers") {
			previous := bytes.Clone(memory)
			var runs [][2]int64
			for p := rapid.IntRange(0, 60).Draw(t, "gap"); p < pages; p += rapid.IntRange(0, 60).Draw(t, "gap") {
				count := min(rapid.IntRange(1, 100).Draw(t, "count"), pages-p)
				kind := rapid.IntRange(0, 3).Draw(t, "kind")
				for q := p; q < p+count; q++ {
					page := memory[q*PageSize : (q+1)*PageSize]
					switch kind {
					case 0:
						clear(page)
					case 1:
						copy(page, noise(uint64(q*10+n), 1))
					case 2:
						copy(page, strings.Repeat(fmt.Sprint(n, q, " "), 300))
					}
				}
				runs = append(runs, [2]int64{int64(p), int64(count)})
				p += count
			}
			cfg := WriteConfig{ID: id(n + 1), Parent: id(n), MemoryBytes: size, Pages: runsOf(runs...), Memory: bytes.NewReader(memory)}
			below, base := layers, io.ReaderAt(nil)
			if n := rapid.IntRange(0, len(layers)).Draw(t, "in base"); n > 0 {
				base, below = bytes.NewReader(previous), nil // as if all were
				if n < len(layers) {
					base, below = layered(t, size, layers[:n]), layers[n:]
				}
			}
			var err error
			cfg.Previous, err = NewView(base, size, below...)
			must(t, err)
			layers = append(layers, writeFor(t, filepath.Join(dir, durable.NewID()), cfg, previous, memory))
		}
		view, err := NewView(nil, size, layers...)
		must(t, err)
		got := make([]byte, size)
		_, err = view.ReadAt(got, 0)
		must(t, err)
		if !bytes.Equal(got, memory) {
			t.Fatal("the view is not the memory")
		}
		path := filepath.Join(dir, "memory")
		must(t, Materialize(context.Background(), MaterializeConfig{Path: path, MemoryBytes: size, Layers: layers, Unsynced: true}))
		got, err = os.ReadFile(path)
		must(t, err)
		if !bytes.Equal(got, memory) {
			t.Fatal("the memory file is not the memory")
		}
	})
}

// layered is the memory that the lower layers of a chain stand for.
func layered(t *rapid.T, size int64, layers []*Layer) io.ReaderAt {
	v, err := NewView(nil, size, layers...)
	must(t, err)
	b := make([]byte, size)
	_, err = v.ReadAt(b, 0)
	must(t, err)
	return bytes.NewReader(b)
}

// above is a memory without layers.
func above(t testing.TB, size int64, base io.ReaderAt) *View {
	t.Helper()
	v, err := NewView(base, size)
	must(t, err)
	return v
}

// writeFor writes a layer and checks what it says of itself.
func writeFor(t *rapid.T, path string, cfg WriteConfig, previous, memory []byte) *Layer {
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	sum, err := Write(context.Background(), f, cfg)
	must(t, err)
	var data, zero, same int64
	for offset, length := range cfg.Pages {
		for at := offset; at < offset+length; at += PageSize {
			now := memory[at : at+PageSize]
			switch {
			case bytes.Equal(now, previous[at:at+PageSize]):
				same++
			case bytes.Equal(now, make([]byte, PageSize)):
				zero++
			default:
				data++
			}
		}
	}
	if sum.DataPages != data || sum.ZeroPages != zero || sum.SamePages != same {
		t.Fatalf("%+v, want %d data, %d zero, %d same", sum, data, zero, same)
	}
	l, err := Open(path)
	must(t, err)
	must(t, l.Verify(context.Background()))
	want := Info{ID: cfg.ID, Parent: cfg.Parent, MemoryBytes: cfg.MemoryBytes, DataPages: data, ZeroPages: zero, Bytes: sum.Bytes, Digest: sum.Digest}
	if l.Info() != want {
		t.Fatalf("%+v, want %+v", l.Info(), want)
	}
	return l
}

func TestZeroPagesCostNextToNothing(t *testing.T) {
	const pages = 1 << 16
	old := noise(1, 1)
	previous := readerFunc(func(b []byte, _ int64) { // not zero anywhere
		for i := 0; i < len(b); i += PageSize {
			copy(b[i:], old)
		}
	})
	zero := readerFunc(func(b []byte, _ int64) { clear(b) })
	l, sum := file(t, WriteConfig{ID: id(1), MemoryBytes: pages * PageSize, Pages: runsOf([2]int64{0, pages}), Memory: zero, Previous: above(t, pages*PageSize, previous)})
	if sum.ZeroPages != pages || sum.Bytes > 300 {
		t.Errorf("%+v", sum)
	}
	must(t, l.Verify(t.Context()))
	_, sum = file(t, WriteConfig{ID: id(1), MemoryBytes: pages * PageSize, Pages: runsOf([2]int64{0, pages}), Memory: zero})
	if sum.SamePages != pages || sum.Bytes != headerLength+trailerLength {
		t.Errorf("%+v", sum)
	}
}

// readerFunc is an endless io.ReaderAt.
type readerFunc func(b []byte, off int64)

func (f readerFunc) ReadAt(b []byte, off int64) (int, error) {
	f(b, off)
	return len(b), nil
}

func TestManyZeroRuns(t *testing.T) {
	const pages = 3 * maxFrameRuns
	var runs [][2]int64
	for p := int64(0); p < pages; p += 2 {
		runs = append(runs, [2]int64{p, 1})
	}
	one := readerFunc(func(b []byte, _ int64) { b[0] = 1 })
	l, sum := file(t, WriteConfig{ID: id(1), MemoryBytes: pages * PageSize, Pages: runsOf(runs...), Memory: readerFunc(func(b []byte, _ int64) { clear(b) }), Previous: above(t, pages*PageSize, one)})
	if sum.ZeroPages != pages/2 || len(l.frames) != 2 {
		t.Errorf("%+v in %d frames", sum, len(l.frames))
	}
	must(t, l.Verify(t.Context()))
}

func TestWriteRefuses(t *testing.T) {
	good := func() WriteConfig {
		return WriteConfig{ID: id(1), MemoryBytes: 10 * PageSize, Pages: runsOf([2]int64{0, 10}), Memory: bytes.NewReader(noise(1, 10))}
	}
	for name, change := range map[string]func(*WriteConfig){
		"no id":           func(c *WriteConfig) { c.ID = "" },
		"capital id":      func(c *WriteConfig) { c.ID = "ABCDEF0123456789" },
		"own parent":      func(c *WriteConfig) { c.Parent = c.ID },
		"short parent":    func(c *WriteConfig) { c.Parent = "1" },
		"no memory":       func(c *WriteConfig) { c.MemoryBytes = 0 },
		"half a page":     func(c *WriteConfig) { c.MemoryBytes += 2048 },
		"huge":            func(c *WriteConfig) { c.MemoryBytes = maxMemory + PageSize },
		"behind the end":  func(c *WriteConfig) { c.Pages = runsOf([2]int64{5, 6}) },
		"backwards":       func(c *WriteConfig) { c.Pages = runsOf([2]int64{5, 1}, [2]int64{4, 1}) },
		"overlap":         func(c *WriteConfig) { c.Pages = runsOf([2]int64{5, 2}, [2]int64{6, 1}) },
		"empty run":       func(c *WriteConfig) { c.Pages = runsOf([2]int64{5, 0}) },
		"part of a page":  func(c *WriteConfig) { c.Pages = func(y func(int64, int64) bool) { y(1, PageSize) } },
		"negative offset": func(c *WriteConfig) { c.Pages = runsOf([2]int64{-1, 1}) },
	} {
		cfg := good()
		change(&cfg)
		if _, err := Write(t.Context(), &bytes.Buffer{}, cfg); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	cfg := good()
	cfg.Memory = bytes.NewReader(noise(1, 9))
	if _, err := Write(t.Context(), &bytes.Buffer{}, cfg); err == nil {
		t.Error("short memory")
	}
	cfg = good()
	cfg.Previous = above(t, cfg.MemoryBytes, bytes.NewReader(nil))
	if _, err := Write(t.Context(), &bytes.Buffer{}, cfg); err == nil {
		t.Error("short previous memory")
	}
	full := errors.New("full")
	for n := range 4 {
		if _, err := Write(t.Context(), &failing{n, full}, good()); !errors.Is(err, full) && n < 3 {
			t.Errorf("write %d fails: %v", n, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cfg = good()
	cfg.MemoryBytes = 1 << 30
	cfg.Pages = runsOf([2]int64{0, 1 << 18})
	cfg.Memory = readerFunc(func(b []byte, off int64) {
		if off > 1<<20 {
			cancel()
		}
		b[0] = 1
	})
	if _, err := Write(ctx, &bytes.Buffer{}, cfg); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

// failing is a writer that fails after n writes.
type failing struct {
	n   int
	err error
}

func (f *failing) Write(b []byte) (int, error) {
	if f.n--; f.n < 0 {
		return 0, f.err
	}
	return len(b), nil
}

// sample is a small file with everything in it.
func sample(t testing.TB) []byte {
	t.Helper()
	memory := append(noise(1, 3), make([]byte, 7*PageSize)...)
	copy(memory[8*PageSize:], strings.Repeat("text ", 1000))
	previous := bytes.Repeat([]byte{1}, 10*PageSize)
	copy(previous[2*PageSize:], memory[2*PageSize:3*PageSize])
	var b bytes.Buffer
	_, err := Write(t.Context(), &b, WriteConfig{
		ID: id(2), Parent: id(1), MemoryBytes: 10 * PageSize,
		Pages: runsOf([2]int64{0, 1}, [2]int64{2, 8}), Memory: bytes.NewReader(memory), Previous: above(t, 10*PageSize, bytes.NewReader(previous)),
	})
	must(t, err)
	return b.Bytes()
}

// judge opens and verifies a file with this content.
func judge(t testing.TB, path string, content []byte) error {
	t.Helper()
	must(t, os.WriteFile(path, content, 0o600))
	l, err := Open(path)
	if err != nil {
		return err
	}
	defer l.Close()
	return l.Verify(context.Background())
}

func TestEachDamagedByteIsFound(t *testing.T) {
	good := sample(t)
	path := filepath.Join(t.TempDir(), "layer")
	must(t, judge(t, path, good))
	table := int(binary.LittleEndian.Uint64(good[len(good)-trailerLength+8:]))
	for i := range good {
		if i > headerLength+64 && i < table && i%17 != 0 {
			continue // payload
		}
		bad := bytes.Clone(good)
		bad[i] ^= 1 << (i % 8)
		err := judge(t, path, bad)
		if !errdefs.Is(err, errdefs.Storage) && !errdefs.Is(err, errdefs.Incompatible) || !strings.Contains(err.Error(), path) {
			t.Fatalf("byte %d changed: %v", i, err)
		}
	}
	for n := 0; n < len(good); n += 1 + n/50 {
		if err := judge(t, path, good[:n]); !errdefs.Is(err, errdefs.Storage) {
			t.Fatalf("cut after %d bytes: %v", n, err)
		}
	}
	if err := judge(t, path, append(bytes.Clone(good), 0)); err == nil {
		t.Error("a byte was appended")
	}
}

// forge makes a file of frames with right digests of payloads and table,
// whatever else they say.
func forge(h header, frames []forged, t trailer) []byte {
	b := h.encode()
	var table []byte
	for _, f := range frames {
		f.digest = sha256.Sum256(f.payload)
		if f.length != 0 {
			f.stored = f.length
		} else {
			f.stored = len(f.payload)
		}
		for range f.pages {
			f.sums = append(f.sums, sumOf(f.plain))
		}
		b = append(b, f.payload...)
		table = f.encode(table)
	}
	t.tableOffset += int64(len(b))
	t.frames += int64(len(frames))
	end := t.encode()
	digest := rootDigest(b[:headerLength], table, end)
	return slices.Concat(b, table, end, digest[:])
}

type forged struct {
	frame
	payload, plain []byte
	pages, length  int
}

func zstdOf(b []byte) []byte {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		panic(err)
	}
	defer e.Close()
	return e.EncodeAll(b, nil)
}

func TestHostileFiles(t *testing.T) {
	h := header{id: id(2), parent: id(1), memoryBytes: 1000 * PageSize}
	page := noise(5, 1)
	raw := func(runs ...run) forged {
		return forged{frame: frame{runs: runs}, payload: page, plain: page, pages: 1}
	}
	packed := func(payload []byte) forged {
		return forged{frame: frame{runs: []run{{10, 1, true}}, codec: codecZstd}, payload: payload, plain: make([]byte, PageSize), pages: 1}
	}
	with := func(f forged, change func(*forged)) forged {
		change(&f)
		return f
	}
	good := raw(run{10, 1, true})
	data := trailer{dataPages: 1}
	bomb := zstdOf(make([]byte, 64<<20))
	for name, c := range map[string]struct {
		frames []forged
		t      trailer
		ok     bool
	}{
		"good":                      {[]forged{good}, data, true},
		"none":                      {nil, trailer{}, true},
		"zero run":                  {[]forged{{frame: frame{runs: []run{{0, 1000, false}}}}}, trailer{zeroPages: 1000}, true},
		"wrong page count":          {[]forged{good}, trailer{dataPages: 2}, false},
		"wrong zero count":          {[]forged{good}, trailer{dataPages: 1, zeroPages: 1}, false},
		"frames that are not there": {[]forged{good}, trailer{dataPages: 1, frames: 5}, false},
		"fewer frames":              {[]forged{good}, trailer{frames: -1}, false},
		"2^60 frames":               {[]forged{good}, trailer{dataPages: 1, frames: 1 << 60}, false},
		"2^24 frames":               {[]forged{good}, trailer{dataPages: 1, frames: 1<<24 - 1}, false},
		"2^60 pages":                {[]forged{good}, trailer{dataPages: 1 << 60}, false},
		"table before":              {[]forged{good}, trailer{dataPages: 1, tableOffset: -1}, false},
		"table behind":              {[]forged{good}, trailer{dataPages: 1, tableOffset: 1}, false},
		"table far away":            {[]forged{good}, trailer{dataPages: 1, tableOffset: 1 << 60}, false},
		"table at 0":                {[]forged{good}, trailer{dataPages: 1, tableOffset: -headerLength - PageSize}, false},
		"page behind memory":        {[]forged{raw(run{1000, 1, true})}, data, false},
		"run over the end":          {[]forged{raw(run{998, 1, true}, run{999, 2, false})}, trailer{dataPages: 1, zeroPages: 2}, false},
		"page 2^63":                 {[]forged{raw(run{-1 << 63, 1, true})}, data, false},
		"twice the same":            {[]forged{good, good}, trailer{dataPages: 2}, false},
		"descending runs":           {[]forged{raw(run{12, 1, false}, run{10, 1, true})}, trailer{dataPages: 1, zeroPages: 1}, false},
		"descending frames":         {[]forged{raw(run{12, 1, true}), good}, trailer{dataPages: 2}, false},
		"overlapping runs":          {[]forged{raw(run{10, 3, false}, run{11, 1, true})}, trailer{dataPages: 1, zeroPages: 3}, false},
		"empty run":                 {[]forged{raw(run{9, 0, false}, run{10, 1, true})}, data, false},
		"huge run":                  {[]forged{raw(run{10, 1<<32 - 1, true})}, data, false},
		"no runs":                   {[]forged{{}}, trailer{}, false},
		"more runs than sums":       {[]forged{raw(run{10, 2, true})}, data, false},
		"more sums than runs":       {[]forged{raw(run{10, 1, false})}, trailer{dataPages: 1, zeroPages: 1}, false},
		"257 pages":                 {[]forged{{frame: frame{runs: []run{{10, 257, true}}}, payload: noise(1, 257), pages: 257}}, trailer{dataPages: 257}, false},
		"payload too short":         {[]forged{with(good, func(f *forged) { f.payload = page[1:] })}, data, false},
		"payload for two":           {[]forged{with(good, func(f *forged) { f.payload = noise(5, 2) })}, data, false},
		"payload not there":         {[]forged{with(good, func(f *forged) { f.payload, f.length = nil, PageSize })}, data, false},
		"codec 2":                   {[]forged{with(good, func(f *forged) { f.codec = 2 })}, data, false},
		"wrong page digest":         {[]forged{with(good, func(f *forged) { f.plain = noise(6, 1) })}, data, false},
		"not zstd":                  {[]forged{packed(page[:100])}, data, false},
		"empty zstd":                {[]forged{packed(nil)}, data, false},
		"bomb":                      {[]forged{packed(bomb[:min(len(bomb), 4095)])}, data, false},
		"zstd of less":              {[]forged{packed(zstdOf(page[:20]))}, data, false},
		"zstd of more":              {[]forged{packed(zstdOf(make([]byte, 8192)))}, data, false},
		"zstd of as much":           {[]forged{packed(zstdOf(make([]byte, 4096)))}, data, true},
	} {
		err := judge(t, filepath.Join(t.TempDir(), "layer"), forge(h, c.frames, c.t))
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOtherVersionsAreRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "layer")
	for _, at := range []int{8, 12, 56} {
		b := forge(header{id: id(1), memoryBytes: PageSize}, nil, trailer{})
		b[at]++
		index := b[headerLength : len(b)-trailerLength]
		d := rootDigest(b[:headerLength], index, b[len(b)-trailerLength:len(b)-32])
		copy(b[len(b)-32:], d[:])
		if err := judge(t, path, b); !errdefs.Is(err, errdefs.Incompatible) {
			t.Errorf("byte %d: %v", at, err)
		}
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none")); !errdefs.Is(err, errdefs.NotFound) {
		t.Error(err)
	}
}

// TestOldFiles: a file that was written by the first version of the writer.
func TestOldFiles(t *testing.T) {
	path := filepath.Join("testdata", "version1.layer")
	if os.Getenv("HOLDPOINT_UPDATE_GOLDEN") != "" {
		must(t, os.WriteFile(path, sample(t), 0o600))
	}
	l, err := Open(path)
	must(t, err)
	defer l.Close()
	must(t, l.Verify(t.Context()))
	v, err := NewView(nil, 10*PageSize, l)
	must(t, err)
	got := make([]byte, 10*PageSize)
	_, err = v.ReadAt(got, 0)
	must(t, err)
	// Page 1 was not asked for, 2 was the same below.
	want := append(noise(1, 1), make([]byte, 9*PageSize)...)
	copy(want[8*PageSize:], strings.Repeat("text ", 1000))
	if !bytes.Equal(got, want) || l.Info().ZeroPages != 5 || l.Info().DataPages != 3 {
		t.Errorf("it reads differently: %+v", l.Info())
	}
}

func TestMaterialize(t *testing.T) {
	const pages = 200
	size := int64(pages * PageSize)
	memory := noise(3, pages)
	low, _ := file(t, WriteConfig{ID: id(1), MemoryBytes: size, Pages: runsOf([2]int64{0, pages}), Memory: bytes.NewReader(memory)})
	below, err := NewView(nil, size, low)
	must(t, err)
	clear(memory[:100*PageSize])
	high, _ := file(t, WriteConfig{ID: id(2), Parent: id(1), MemoryBytes: size, Pages: runsOf([2]int64{0, 100}), Memory: bytes.NewReader(memory), Previous: below})
	dir := t.TempDir()
	path := filepath.Join(dir, "memory")
	must(t, os.WriteFile(path, []byte("old"), 0o600))
	var steps []string
	fs := &durable.FS{Before: func(s durable.Step) error {
		steps = append(steps, string(s.Op))
		return nil
	}}
	cfg := MaterializeConfig{FS: fs, Path: path, MemoryBytes: size, Layers: []*Layer{low, high}}
	must(t, Materialize(t.Context(), cfg))
	got, err := os.ReadFile(path)
	must(t, err)
	if !bytes.Equal(got, memory) {
		t.Error("the memory differs")
	}
	if got := strings.Join(steps, " "); got != "create sync rename syncdir" {
		t.Errorf("steps: %s", got)
	}
	steps = nil
	cfg.Unsynced = true
	must(t, Materialize(t.Context(), cfg))
	cfg.Unsynced = false
	if got := strings.Join(steps, " "); got != "create rename" {
		t.Errorf("steps without waiting for the disk: %s", got)
	}
	st, err := os.Stat(path)
	must(t, err)
	if st.Mode() != 0o600 {
		t.Errorf("mode %v", st.Mode())
	}

	// After each failure the old file is there and nothing else.
	crash := errors.New("crash")
	for _, op := range []durable.Op{durable.OpCreate, durable.OpSync, durable.OpRename} {
		cfg.FS = &durable.FS{Before: func(s durable.Step) error {
			if s.Op == op {
				return crash
			}
			return nil
		}}
		if err := Materialize(t.Context(), cfg); !errors.Is(err, crash) {
			t.Errorf("%s: %v", op, err)
		}
	}
	cfg.FS = nil
	bad := cfg
	bad.Layers = []*Layer{high}
	if err := Materialize(t.Context(), bad); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("without the lowest: %v", err)
	}
	bad.Layers = []*Layer{high, low}
	if err := Materialize(t.Context(), bad); !errdefs.Is(err, errdefs.Incompatible) {
		t.Errorf("upside down: %v", err)
	}
	bad = cfg
	bad.MemoryBytes *= 2
	if err := Materialize(t.Context(), bad); !errdefs.Is(err, errdefs.Incompatible) {
		t.Errorf("other memory: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Materialize(ctx, cfg); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	damage(t, low)
	if err := Materialize(t.Context(), cfg); !errdefs.Is(err, errdefs.Storage) || !strings.Contains(err.Error(), low.name) {
		t.Errorf("damaged: %v", err)
	}
	entries, err := os.ReadDir(dir)
	must(t, err)
	if got, err := os.ReadFile(path); len(entries) != 1 || err != nil || !bytes.Equal(got, memory) {
		t.Errorf("after failures: %v, %v", entries, err)
	}
}

// damage changes a byte in the last frame of an open layer.
func damage(t *testing.T, l *Layer) {
	t.Helper()
	f, err := os.OpenFile(l.name, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	b := []byte{0}
	_, err = f.ReadAt(b, l.frames[len(l.frames)-1].offset+int64(l.frames[len(l.frames)-1].stored)-5)
	must(t, err)
	b[0]++
	_, err = f.WriteAt(b, l.frames[len(l.frames)-1].offset+int64(l.frames[len(l.frames)-1].stored)-5)
	must(t, err)
}

func TestCoveredFramesAreNotRead(t *testing.T) {
	const pages = 2 * batchPages
	size := int64(pages * PageSize)
	low, _ := file(t, WriteConfig{ID: id(1), MemoryBytes: size, Pages: runsOf([2]int64{0, pages}), Memory: bytes.NewReader(noise(1, pages))})
	memory := noise(2, pages)
	high, _ := file(t, WriteConfig{ID: id(2), Parent: id(1), MemoryBytes: size, Pages: runsOf([2]int64{0, pages}), Memory: bytes.NewReader(memory)})
	damage(t, low)
	path := filepath.Join(t.TempDir(), "memory")
	must(t, Materialize(t.Context(), MaterializeConfig{Path: path, MemoryBytes: size, Layers: []*Layer{low, high}}))
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, memory) {
		t.Errorf("the memory differs: %v", err)
	}
}

func TestViewRefusesDamage(t *testing.T) {
	l, _ := file(t, WriteConfig{ID: id(1), MemoryBytes: 10 * PageSize, Pages: runsOf([2]int64{0, 10}), Memory: bytes.NewReader(noise(1, 10))})
	v, err := NewView(nil, 10*PageSize, l)
	must(t, err)
	b := make([]byte, PageSize)
	for _, bad := range [][2]int64{{1, PageSize}, {0, 5}, {-PageSize, PageSize}} {
		if _, err := v.ReadAt(make([]byte, bad[1]), bad[0]); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("read %v: %v", bad, err)
		}
	}
	if _, err := v.ReadAt(b, 10*PageSize); err == nil {
		t.Error("read behind the end")
	}
	damage(t, l)
	if _, err := v.ReadAt(b, 0); !errdefs.Is(err, errdefs.Storage) {
		t.Errorf("damaged: %v", err)
	}
}

func FuzzOpen(f *testing.F) {
	f.Add(sample(f))
	f.Add(forge(header{id: id(1), memoryBytes: PageSize}, nil, trailer{}))
	f.Add(forge(header{id: id(2), parent: id(1), memoryBytes: 8 * PageSize},
		[]forged{{frame: frame{runs: []run{{first: 1, count: 3}}}}}, trailer{zeroPages: 3}))
	f.Add([]byte(headerMagic + endMagic))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		// Digests would keep the fuzzer out: they are put right first.
		b = mend(bytes.Clone(b))
		path := filepath.Join(dir, "layer")
		must(t, os.WriteFile(path, b, 0o600))
		l, err := Open(path)
		if err != nil {
			return
		}
		defer l.Close()
		verified := l.Verify(context.Background())
		if l.Info().MemoryBytes > 1<<20 {
			return
		}
		v, err := NewView(nil, l.Info().MemoryBytes, l)
		must(t, err)
		viewed := make([]byte, l.Info().MemoryBytes)
		_, verr := v.ReadAt(viewed, 0)
		if verified == nil && verr != nil {
			t.Fatalf("verified, but cannot be read: %v", verr)
		}
		l.info.Parent = ""
		out := filepath.Join(dir, "memory")
		err = Materialize(context.Background(), MaterializeConfig{Path: out, MemoryBytes: l.Info().MemoryBytes, Layers: []*Layer{l}, Unsynced: true})
		if verified == nil && err != nil {
			t.Fatalf("verified, but cannot be materialized: %v", err)
		}
		if err == nil {
			if got, err := os.ReadFile(out); err != nil || verr == nil && !bytes.Equal(got, viewed) {
				t.Fatalf("view and memory file differ: %v", err)
			}
		}
	})
}

// mend puts right the lengths and digests of what looks like a layer.
func mend(b []byte) []byte {
	if len(b) < headerLength+trailerLength {
		return b
	}
	end := b[len(b)-trailerLength:]
	table := int(binary.LittleEndian.Uint64(end[8:]) % uint64(len(b)))
	if table < headerLength || table > len(b)-trailerLength {
		return b
	}
	binary.LittleEndian.PutUint64(end[8:], uint64(table))
	offset := headerLength
	for f := b[table : len(b)-trailerLength]; len(f) >= frameLength; {
		stored := int(binary.LittleEndian.Uint32(f))
		if stored > table-offset {
			break
		}
		d := sha256.Sum256(b[offset : offset+stored])
		copy(f[16:], d[:])
		offset += stored
		rest := frameLength + int(binary.LittleEndian.Uint16(f[8:]))*runLength + int(binary.LittleEndian.Uint16(f[12:]))*sumLength
		f = f[min(rest, len(f)):]
	}
	d := rootDigest(b[:headerLength], b[table:len(b)-trailerLength], end[:trailerLength-32])
	copy(end[trailerLength-32:], d[:])
	return b
}
