package store

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// baseWorld is a chain of two layers with zero pages in both, and its memory.
func baseWorld(t *testing.T) (MaterializeConfig, []byte) {
	t.Helper()
	const pages = 4 * batchPages
	size := int64(pages * PageSize)
	memory := noise(1, pages)
	clear(memory[10*PageSize : 40*PageSize])
	low, _ := file(t, WriteConfig{ID: id(1), MemoryBytes: size, Pages: runsOf([2]int64{0, pages}), Memory: bytes.NewReader(memory)})
	below, err := NewView(nil, size, low)
	must(t, err)
	copy(memory[100*PageSize:], noise(2, 50))
	clear(memory[120*PageSize : 125*PageSize])
	high, _ := file(t, WriteConfig{
		ID: id(2), Parent: id(1), MemoryBytes: size, Pages: runsOf([2]int64{100, 50}), Memory: bytes.NewReader(memory), Previous: below,
	})
	return MaterializeConfig{
		Path: filepath.Join(t.TempDir(), "memory"), MemoryBytes: size, Layers: []*Layer{low, high}, Unsynced: true,
	}, memory
}

func (cfg MaterializeConfig) gives(t *testing.T, memory []byte) {
	t.Helper()
	must(t, Materialize(t.Context(), cfg))
	if got, err := os.ReadFile(cfg.Path); err != nil || !bytes.Equal(got, memory) {
		t.Errorf("the memory differs: %v", err)
	}
}

// TestBaseSparesTheLayers: what the base has is not read from the layers, so
// that not even damage there is seen.
func TestBaseSparesTheLayers(t *testing.T) {
	cfg, memory := baseWorld(t)
	damage(t, cfg.Layers[0])
	damage(t, cfg.Layers[1])
	if err := Materialize(t.Context(), cfg); !errdefs.Is(err, errdefs.Storage) {
		t.Fatalf("without a base: %v", err)
	}
	cfg.Base = bytes.NewReader(memory)
	cfg.gives(t, memory)
}

// TestBaseIsNotTrusted: whatever a base has, the memory is what the layers say.
func TestBaseIsNotTrusted(t *testing.T) {
	cfg, memory := baseWorld(t)
	bad := bytes.Clone(memory)
	for p := 7; p < len(bad)/PageSize; p += 90 {
		bad[p*PageSize+p]++
	}
	for name, base := range map[string]io.ReaderAt{
		"some bytes differ": bytes.NewReader(bad),
		"all zero":          readerFunc(func(b []byte, _ int64) { clear(b) }),
		"nowhere zero":      readerFunc(func(b []byte, _ int64) { b[0] = 1 }),
		"cut in a page":     bytes.NewReader(memory[:50*PageSize+9]),
		"empty":             bytes.NewReader(nil),
	} {
		cfg.Base = base
		t.Run(name, func(t *testing.T) { cfg.gives(t, memory) })
	}
	damage(t, cfg.Layers[0]) // in its last frame
	bad = bytes.Clone(memory)
	bad[len(bad)-1]++
	cfg.Base = bytes.NewReader(bad)
	if err := Materialize(t.Context(), cfg); !errdefs.Is(err, errdefs.Storage) {
		t.Errorf("base and layer are damaged at the same page: %v", err)
	}
}

func TestSample(t *testing.T) {
	cfg, memory := baseWorld(t)
	s, err := NewSample(cfg.MemoryBytes, cfg.Layers)
	must(t, err)
	if n := len(s.pages); n < samplePages/2 || n > samplePages {
		t.Errorf("a sample of %d pages", n)
	}
	half := bytes.Clone(memory)
	copy(half, noise(9, len(memory)/PageSize/2))
	for _, c := range []struct {
		name        string
		memory      io.ReaderAt
		least, most float64
	}{
		{"the memory", bytes.NewReader(memory), 1, 1},
		{"half of it", bytes.NewReader(half), 0.4, 0.6},
		{"another", bytes.NewReader(noise(9, len(memory)/PageSize)), 0, 0},
		{"nothing", bytes.NewReader(nil), 0, 0},
	} {
		if got := s.In(c.memory); got < c.least || got > c.most {
			t.Errorf("%s has %v of the sample", c.name, got)
		}
	}
	empty, _ := file(t, WriteConfig{ID: id(1), MemoryBytes: cfg.MemoryBytes, Pages: runsOf(), Memory: bytes.NewReader(nil)})
	s, err = NewSample(cfg.MemoryBytes, []*Layer{empty})
	must(t, err)
	if got := s.In(bytes.NewReader(memory)); got != 0 {
		t.Errorf("a memory without data is in one with: %v", got)
	}
	if _, err := NewSample(cfg.MemoryBytes, cfg.Layers[1:]); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("without the lowest layer: %v", err)
	}
}
