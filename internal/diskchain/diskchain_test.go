package diskchain

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// double is a merger whose files hold the ids of what was merged.
type double struct {
	t    *testing.T
	fail error
	made []string
}

func (d *double) Merge(_ context.Context, below, layers []disk.Layer, path string) error {
	if d.fail != nil {
		return d.fail
	}
	if len(below) != 1 || below[0].ID != "image" {
		d.t.Errorf("merged over %v", below)
	}
	var ids []string
	for _, l := range layers {
		if strings.HasPrefix(l.ID, "merged-") {
			content, err := os.ReadFile(l.Path)
			if err != nil {
				return err
			}
			ids = append(ids, string(content))
			continue
		}
		ids = append(ids, l.ID)
	}
	d.made = append(d.made, fmt.Sprint(len(layers)))
	return os.WriteFile(path, []byte(strings.Join(ids, " ")), 0o400)
}

func newChains(t *testing.T) (*Chains, *double) {
	t.Helper()
	dir, err := os.MkdirTemp("", "hp") // the path of a home is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	h, err := home.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Create(); err != nil {
		t.Fatal(err)
	}
	merger := &double{t: t}
	return New(Config{Home: h, Files: &durable.FS{}, Merger: merger, Log: slog.New(slog.DiscardHandler)}), merger
}

func layers(n int) (list []catalog.Layer) {
	for i := range n {
		id := fmt.Sprintf("%016x", i)
		list = append(list, catalog.Layer{ID: id, Path: "layers/" + id + ".qcow2", Format: disk.Qcow2})
	}
	return list
}

var root = machine.Layer{ID: "image", Path: "/image/root", Format: disk.Raw}

// shown is what a chain shows: the ids of its layers, merged or not.
func shown(t *testing.T, chain []machine.Layer) (ids []string) {
	t.Helper()
	for _, l := range chain {
		if !strings.HasPrefix(l.ID, "merged-") {
			ids = append(ids, l.ID)
			continue
		}
		content, err := os.ReadFile(l.Path)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, strings.Fields(string(content))...)
	}
	return ids
}

func TestOpenNeverShowsAnythingElse(t *testing.T) {
	c, merger := newChains(t)
	for n := 1; n <= 60; n++ {
		list := layers(n)
		chain, err := c.Open(t.Context(), root, list)
		if err != nil {
			t.Fatal(err)
		}
		if len(chain) > MaxOpen {
			t.Errorf("%d layers: %d files", n, len(chain))
		}
		want := []string{"image"}
		for _, l := range list {
			want = append(want, l.ID)
		}
		if got := shown(t, chain); !slices.Equal(got, want) {
			t.Fatalf("%d layers: %v", n, got)
		}
		if top := chain[len(chain)-1]; top.ID != list[n-1].ID {
			t.Errorf("%d layers: top %s", n, top.ID)
		}
	}
	// 16 at once first, then 8 more each, over what is merged already.
	if want := []string{"16", "9", "9", "9", "9", "9"}; !slices.Equal(merger.made, want) {
		t.Errorf("merges of %v layers, want %v", merger.made, want)
	}
}

func TestOpenAtOnceMergesOnce(t *testing.T) {
	c, merger := newChains(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := c.Open(t.Context(), root, layers(30)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(merger.made) != 1 {
		t.Errorf("merged %d times", len(merger.made))
	}
}

func TestFailedMergeGivesTheWholeChain(t *testing.T) {
	c, merger := newChains(t)
	merger.fail = errors.New("no")
	chain, err := c.Open(t.Context(), root, layers(30))
	if err != nil || len(chain) != 31 {
		t.Errorf("%d files, %v", len(chain), err)
	}
}

func TestSweepSparesWhatIsUsed(t *testing.T) {
	c, _ := newChains(t)
	used, err := c.Open(t.Context(), root, layers(30))
	if err != nil {
		t.Fatal(err)
	}
	other, err := c.Open(t.Context(), root, layers(50))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Sweep(func(path string) bool { return path == used[1].Path }); err != nil {
		t.Fatal(err)
	}
	if !exists(used[1].Path) || exists(other[1].Path) {
		t.Errorf("used is there: %v, unused: %v", exists(used[1].Path), exists(other[1].Path))
	}
}
