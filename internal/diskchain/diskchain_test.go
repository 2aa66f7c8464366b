package diskchain

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

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
	// made has how many files each merge was of, copied the bytes of all.
	made   []int
	copied int
	// began is told of each merge that is not to be fast, which then waits for
	// its end; nil for none.
	began chan struct{}
}

func (d *double) Merge(ctx context.Context, job disk.Merge) error {
	if d.began != nil && job.BytesPerSecond > 0 {
		d.began <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	if d.fail != nil {
		return d.fail
	}
	if job.Below[0].ID != "image" || slices.ContainsFunc(job.Layers, func(l disk.Layer) bool { return l.ID == "image" }) {
		d.t.Errorf("merged %v over %v", job.Layers, job.Below)
	}
	var content strings.Builder
	for _, l := range job.Layers {
		b, err := os.ReadFile(l.Path)
		if err != nil {
			return err
		}
		content.Write(b)
	}
	d.made = append(d.made, len(job.Layers))
	d.copied += content.Len()
	return os.WriteFile(job.Path, []byte(content.String()), 0o400)
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
	return New(Config{Home: h, Files: &durable.FS{}, Merger: merger, Idle: func() bool { return false }, Log: slog.New(slog.DiscardHandler)}), merger
}

// layers are n layers of a line each, which is their id.
func (c *Chains) layers(t *testing.T, n int) (list []catalog.Layer) {
	t.Helper()
	for i := range n {
		id := fmt.Sprintf("%016x", i)
		l := catalog.Layer{ID: id, Path: "layers/" + id + ".qcow2", Format: disk.Qcow2}
		if err := os.WriteFile(filepath.Join(c.cfg.Home.Dir(), l.Path), []byte(id+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		list = append(list, l)
	}
	return list
}

var root = machine.Layer{ID: "image", Path: "/image/root", Format: disk.Raw}

// wantShown compares what a chain shows, merged or not, with all of its layers.
func wantShown(t *testing.T, chain []machine.Layer, list []catalog.Layer) {
	t.Helper()
	var shown strings.Builder
	for _, l := range chain[1:] {
		b, err := os.ReadFile(l.Path)
		if err != nil {
			t.Fatal(err)
		}
		shown.Write(b)
	}
	var want strings.Builder
	for _, l := range list {
		want.WriteString(l.ID + "\n")
	}
	if chain[0] != root || shown.String() != want.String() {
		t.Fatalf("%d layers show %q over %s", len(list), shown.String(), chain[0].ID)
	}
	if top := chain[len(chain)-1]; top.ID != list[len(list)-1].ID {
		t.Fatalf("%d layers: the top is %s", len(list), top.ID)
	}
}

func TestOpenNeverShowsAnythingElse(t *testing.T) {
	c, _ := newChains(t)
	all := c.layers(t, 120)
	for n := 1; n <= len(all); n++ {
		chain, err := c.Open(t.Context(), root, all[:n])
		if err != nil {
			t.Fatal(err)
		}
		if len(chain) > MaxOpen {
			t.Errorf("%d layers: %d files", n, len(chain))
		}
		wantShown(t, chain, all[:n])
	}
}

// TestShorten grows a running machine's disk by a layer at a time.
func TestShorten(t *testing.T) {
	c, merger := newChains(t)
	all := c.layers(t, 400)
	open := []machine.Layer{root}
	most := 0
	for n := 1; n <= len(all); n++ {
		top := all[n-1]
		open = append(open, machine.Layer{ID: top.ID, Path: filepath.Join(c.cfg.Home.Dir(), top.Path), Format: top.Format})
		_, err := c.Shorten(t.Context(), root, all[:n], ids(open), func(r Replacement) error {
			open = replace(t, open, r)
			// It is spared although no run has recorded it yet.
			return c.Sweep(t.Context(), uses{open: inUse(open, r)})
		})
		if err != nil {
			t.Fatal(err)
		}
		wantShown(t, open, all[:n])
		most = max(most, len(open))
	}
	if most > 16 {
		t.Errorf("up to %d files were open", most)
	}
	if times := merger.copied / (len(all) * 17); times > 6 {
		t.Errorf("each byte was copied %d times", times)
	}
	// A later start finds what was merged.
	made := len(merger.made)
	chain, err := c.Open(t.Context(), root, all)
	if err != nil || len(merger.made) != made || len(chain) > len(open) {
		t.Errorf("%d files after a start, %d before; %v", len(chain), len(open), err)
	}
	wantShown(t, chain, all)
}

// uses is what wants merged files.
type uses struct {
	open   map[string]bool
	chains [][]catalog.Layer
	fail   error
}

func (u uses) OpenDisks() (map[string]bool, bool) { return u.open, u.open != nil }

func (u uses) Chains(context.Context) ([][]catalog.Layer, error) { return u.chains, u.fail }

// inUse are the files of a chain but for the new one.
func inUse(chain []machine.Layer, r Replacement) map[string]bool {
	paths := map[string]bool{}
	for _, l := range chain {
		paths[l.Path] = l.Path != r.Merged.Path
	}
	return paths
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// opened are the ids of a disk of which nothing was merged.
func opened(layers []catalog.Layer) []string {
	open := []string{"image"}
	for _, l := range layers {
		open = append(open, l.ID)
	}
	return open
}

func ids(chain []machine.Layer) (ids []string) {
	for _, l := range chain {
		ids = append(ids, l.ID)
	}
	return ids
}

func replace(t *testing.T, open []machine.Layer, r Replacement) []machine.Layer {
	t.Helper()
	from, to := slices.Index(ids(open), r.FirstID), slices.Index(ids(open), r.LastID)
	if from < 1 || to < from || to >= len(open)-1 {
		t.Fatalf("replace %s to %s of %v", r.FirstID, r.LastID, ids(open))
	}
	return slices.Replace(slices.Clone(open), from, to+1, r.Merged)
}

func TestShortenLeavesWhatDoesNotFit(t *testing.T) {
	c, merger := newChains(t)
	all := c.layers(t, 30)
	open := opened(all)
	for what, ids := range map[string][]string{
		"nothing": {}, "the image alone": {"image"}, "another top": open[:len(open)-1], "one left out": append(slices.Clone(open[:5]), open[6:]...),
		"an unknown one": append(slices.Clone(open[:30]), "x"), "few": append([]string{"image", all[0].ID + "-" + all[25].ID}, open[27:]...),
		"a merged top": {"image", all[0].ID + "-" + all[29].ID}, "in the wrong order": {"image", all[29].ID + "-" + all[0].ID},
	} {
		if shorter, err := c.Shorten(t.Context(), root, all, ids, nil); shorter || err != nil {
			t.Errorf("%s: %v, %v", what, shorter, err)
		}
	}
	merger.fail = errors.New("no")
	if shorter, err := c.Shorten(t.Context(), root, all, open, nil); shorter || err == nil {
		t.Error("a merge that failed is worth it")
	}
}

func TestOpenAtOnceMergesOnce(t *testing.T) {
	c, merger := newChains(t)
	all := c.layers(t, 30)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := c.Open(t.Context(), root, all); err != nil {
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
	all := c.layers(t, 30)
	merger.fail = errors.New("no")
	chain, err := c.Open(t.Context(), root, all)
	if err != nil || len(chain) != 31 {
		t.Errorf("%d files, %v", len(chain), err)
	}
}

// TestOpenDoesNotWaitForTheBackground opens a long chain while one is merged
// that nobody waits for.
func TestOpenDoesNotWaitForTheBackground(t *testing.T) {
	c, merger := newChains(t)
	all := c.layers(t, 30)
	open := opened(all)
	merger.began = make(chan struct{})
	ended := make(chan error)
	go func() {
		_, err := c.Shorten(t.Context(), root, all, open, nil)
		ended <- err
	}()
	<-merger.began
	if err := c.Sweep(t.Context(), nil); err != nil { // does nothing meanwhile
		t.Error(err)
	}
	chain, err := c.Open(t.Context(), root, all)
	if err != nil || len(chain) > MaxOpen {
		t.Errorf("%d files, %v", len(chain), err)
	}
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the one in the background ended with %v", err)
	}
}

func TestSweepSparesWhatIsUsed(t *testing.T) {
	c, _ := newChains(t)
	all := c.layers(t, 100)
	var merged []string
	for _, n := range []int{30, 60, 100} {
		chain, err := c.Open(t.Context(), root, all[:n])
		if err != nil {
			t.Fatal(err)
		}
		merged = append(merged, chain[1].Path)
	}
	used := map[string]bool{merged[0]: true}
	if err := c.Sweep(t.Context(), uses{open: used}); err != nil || !exists(merged[1]) {
		t.Errorf("swept what a run may be about to open: %v", err)
	}
	for path := range c.opened {
		c.opened[path] = time.Now().Add(-2 * beginning)
	}
	if err := c.Sweep(t.Context(), uses{}); err != nil || !exists(merged[1]) || !exists(merged[2]) {
		t.Errorf("swept without knowing what is open: %v", err)
	}
	err := c.Sweep(t.Context(), uses{open: used, fail: errors.New("no answer")})
	if err == nil || !exists(merged[1]) || !exists(merged[2]) {
		t.Errorf("swept without knowing the chains: %v", err)
	}
	// A stopped machine will open the last one.
	if err := c.Sweep(t.Context(), uses{open: used, chains: [][]catalog.Layer{all}}); err != nil {
		t.Fatal(err)
	}
	if !exists(merged[0]) || exists(merged[1]) || !exists(merged[2]) {
		t.Errorf("there are: used %v, unused %v, wanted %v", exists(merged[0]), exists(merged[1]), exists(merged[2]))
	}
}

// TestDamagedFilesAreNotUsed: a merged file that was touched is none, and one
// that only reading can tell is found by Check.
func TestDamagedFilesAreNotUsed(t *testing.T) {
	for what, damage := range map[string]func(path string, info os.FileInfo) error{
		"empty":     func(path string, _ os.FileInfo) error { return os.Truncate(path, 0) },
		"missing":   func(path string, _ os.FileInfo) error { return os.Remove(path) },
		"no stamp":  func(path string, _ os.FileInfo) error { return os.Remove(stampOf(path)) },
		"bad stamp": func(path string, _ os.FileInfo) error { return os.WriteFile(stampOf(path), []byte("{"), 0o600) },
		"garbled": func(path string, info os.FileInfo) error {
			if err := os.Chmod(path, 0o600); err != nil {
				return err
			}
			return os.WriteFile(path, make([]byte, info.Size()), 0o600)
		},
	} {
		t.Run(what, func(t *testing.T) {
			c, _ := newChains(t)
			all := c.layers(t, 30)
			chain, err := c.Open(t.Context(), root, all)
			if err != nil {
				t.Fatal(err)
			}
			path := chain[1].Path
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := damage(path, info); err != nil {
				t.Fatal(err)
			}
			chain, err = c.Open(t.Context(), root, all)
			if err != nil {
				t.Fatal(err)
			}
			wantShown(t, chain, all)

			// As the disk would, without any trace.
			if info, err = os.Stat(path); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, make([]byte, info.Size()), 0o600), os.Chtimes(path, info.ModTime(), info.ModTime())); err != nil {
				t.Fatal(err)
			}
			if err := c.Check(t.Context(), all); err != nil {
				t.Fatal(err)
			}
			if exists(path) {
				t.Error("a damaged file is kept")
			}
			if chain, err = c.Open(t.Context(), root, all); err != nil {
				t.Fatal(err)
			}
			wantShown(t, chain, all)
			if err := c.Check(t.Context(), all); err != nil || !exists(chain[1].Path) {
				t.Errorf("a sound file is given up: %v", err)
			}
		})
	}
}

// TestRemoveUnfinished removes what the merger and the stamps call their files
// in the making, and nothing else.
func TestRemoveUnfinished(t *testing.T) {
	c, _ := newChains(t)
	if err := c.RemoveUnfinished(); err != nil { // there is no folder yet
		t.Fatal(err)
	}
	chain, err := c.Open(t.Context(), root, c.layers(t, 30))
	if err != nil {
		t.Fatal(err)
	}
	const id = "0123456789abcdef"
	dir, merged := c.cfg.Home.MergedDisks(), chain[1].Path
	left := []string{dir + "/." + id + ".tmp", dir + "/." + id + ".top.tmp", stampOf(merged) + "." + id + ".tmp"}
	for _, path := range left {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.RemoveUnfinished(); err != nil {
		t.Fatal(err)
	}
	for _, path := range left {
		if exists(path) {
			t.Errorf("%s is still there", path)
		}
	}
	if !exists(merged) || !exists(stampOf(merged)) {
		t.Error("the merged file is gone")
	}
}
