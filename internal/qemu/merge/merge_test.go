//go:build linux

package merge

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
)

const size = 32 << 20

// scene is a chain of layers over a raw image, written by qemu-io.
type scene struct {
	t      *testing.T
	dir    string
	disk   *disk.Disk
	image  disk.Layer
	layers []disk.Layer
}

func newScene(t *testing.T, layers int) *scene {
	t.Helper()
	for _, tool := range []string{"qemu-io", "qemu-img", "qemu-system-x86_64"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("no %s here", tool)
		}
	}
	s := &scene{t: t, dir: t.TempDir(), disk: disk.New(disk.Config{FS: &durable.FS{}})}
	s.image = disk.Layer{ID: "image", Path: filepath.Join(s.dir, "image.raw"), Format: disk.Raw}
	content := make([]byte, size)
	rand.Read(content[:8<<20])
	if err := os.WriteFile(s.image.Path, content, 0o400); err != nil {
		t.Fatal(err)
	}
	random := mathrand.New(mathrand.NewPCG(1, uint64(layers)))
	for i := range layers {
		id := durable.NewID()
		l := disk.Layer{ID: id, Path: filepath.Join(s.dir, id+".qcow2"), Format: disk.Qcow2}
		if err := s.disk.Create(t.Context(), l.Path, size); err != nil {
			t.Fatal(err)
		}
		s.layers = append(s.layers, l)
		var args []string
		for n := range 6 {
			at, length := random.IntN(size/4096-64)*4096, (1+random.IntN(60))*4096
			write := fmt.Sprintf("write -q -P %d %d %d", 1+(i*6+n)%250, at, length)
			if n == 5 {
				write = fmt.Sprintf("write -q -z %d %d", at, length)
			}
			args = append(args, "-c", write)
		}
		s.io(s.chain(s.layers...), args...)
	}
	for _, l := range s.layers {
		if _, err := s.disk.Seal(t.Context(), l.Path); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func (s *scene) chain(layers ...disk.Layer) []disk.Layer {
	return append([]disk.Layer{s.image}, layers...)
}

func (s *scene) io(chain []disk.Layer, args ...string) {
	s.t.Helper()
	node, err := disk.ChainJSON(chain, true)
	if err != nil {
		s.t.Fatal(err)
	}
	if out, err := exec.Command("qemu-io", append(args, "json:"+string(node))...).CombinedOutput(); err != nil {
		s.t.Fatalf("qemu-io: %v: %s", err, out)
	}
}

// content is what a guest would see of the chain.
func (s *scene) content(chain []disk.Layer) []byte {
	s.t.Helper()
	node, err := disk.ChainJSON(chain, false)
	if err != nil {
		s.t.Fatal(err)
	}
	out := filepath.Join(s.t.TempDir(), "out.raw")
	if text, err := exec.Command("qemu-img", "convert", "-O", "raw", "json:"+string(node), out).CombinedOutput(); err != nil {
		s.t.Fatalf("qemu-img convert: %v: %s", err, text)
	}
	content, err := os.ReadFile(out)
	if err != nil {
		s.t.Fatal(err)
	}
	return content
}

func (s *scene) files() (names []string) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (s *scene) merger() *Merger {
	return New(Config{Host: host.New(host.Config{}), Files: &durable.FS{}})
}

// mergeAll merges all layers into one that has to show the same.
func (s *scene) mergeAll(bytesPerSecond int64) (merged disk.Layer, took time.Duration) {
	s.t.Helper()
	want := s.content(s.chain(s.layers...))
	merged = disk.Layer{ID: "merged", Path: filepath.Join(s.dir, "merged.qcow2"), Format: disk.Qcow2}
	began := time.Now()
	job := disk.Merge{Below: []disk.Layer{s.image}, Layers: s.layers, Path: merged.Path, BytesPerSecond: bytesPerSecond}
	if err := s.merger().Merge(s.t.Context(), job); err != nil {
		s.t.Fatal(err)
	}
	took = time.Since(began)
	if !bytes.Equal(want, s.content(s.chain(merged))) {
		s.t.Error("the merged layer shows something else than the layers")
	}
	return merged, took
}

func TestMergedShowsTheSame(t *testing.T) {
	for _, n := range []int{2, 7, 30} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			s := newScene(t, n)
			before := make([][]byte, n)
			for i, l := range s.layers {
				before[i], _ = os.ReadFile(l.Path)
			}
			merged, _ := s.mergeAll(0)
			for i, l := range s.layers {
				if now, _ := os.ReadFile(l.Path); !bytes.Equal(now, before[i]) {
					t.Errorf("layer %d was changed", i)
				}
			}
			if err := s.disk.Check(t.Context(), s.chain(merged)); err != nil {
				t.Error(err)
			}
			if names := s.files(); len(names) != n+2 {
				t.Errorf("files %v", names)
			}
		})
	}
}

// TestDiscarded merges what a guest has discarded, which is zeros and takes no space.
func TestDiscarded(t *testing.T) {
	s := newScene(t, 3)
	discarded := disk.Layer{ID: "discarded", Path: filepath.Join(s.dir, "discarded.qcow2"), Format: disk.Qcow2}
	if err := s.disk.Create(t.Context(), discarded.Path, size); err != nil {
		t.Fatal(err)
	}
	s.layers = append(s.layers, discarded)
	s.io(s.chain(s.layers...), "-c", fmt.Sprintf("write -q -z -u 0 %d", size), "-c", "write -q -P 7 1M 64k")
	merged, _ := s.mergeAll(0)
	var st unix.Stat_t
	if err := unix.Stat(merged.Path, &st); err != nil {
		t.Fatal(err)
	}
	if taken := st.Blocks * 512; taken > size/4 {
		t.Errorf("%d bytes of zeros take %d on the host", size, taken)
	}
}

// TestSlowly merges what nobody waits for, which is no faster than it may be.
func TestSlowly(t *testing.T) {
	s := newScene(t, 5)
	info, err := os.Stat(s.layers[0].Path)
	if err != nil {
		t.Fatal(err)
	}
	if _, took := s.mergeAll(info.Size()); took < 900*time.Millisecond {
		t.Errorf("copied %d bytes within %s", info.Size(), took)
	}
}

func TestMergedTwiceByStages(t *testing.T) {
	s := newScene(t, 9)
	want := s.content(s.chain(s.layers...))
	first := disk.Layer{ID: "first", Path: filepath.Join(s.dir, "first.qcow2"), Format: disk.Qcow2}
	second := disk.Layer{ID: "second", Path: filepath.Join(s.dir, "second.qcow2"), Format: disk.Qcow2}
	below := []disk.Layer{s.image}
	if err := s.merger().Merge(t.Context(), disk.Merge{Below: below, Layers: s.layers[:5], Path: first.Path}); err != nil {
		t.Fatal(err)
	}
	if err := s.merger().Merge(t.Context(), disk.Merge{Below: below, Layers: append([]disk.Layer{first}, s.layers[5:]...), Path: second.Path}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, s.content(s.chain(second))) {
		t.Error("merged by stages it shows something else")
	}
}

// TestInUse merges layers that another process has open for reading.
func TestInUse(t *testing.T) {
	s := newScene(t, 3)
	node, err := disk.ChainJSON(s.chain(s.layers...), false)
	if err != nil {
		t.Fatal(err)
	}
	reader := exec.Command("qemu-io", "-r", "json:"+string(node))
	in, err := reader.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := reader.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = in.Close(), reader.Wait() }()
	if err := s.merger().Merge(t.Context(), disk.Merge{Below: []disk.Layer{s.image}, Layers: s.layers, Path: filepath.Join(s.dir, "m.qcow2")}); err != nil {
		t.Fatal(err)
	}
}

func TestFailuresLeaveNothing(t *testing.T) {
	s := newScene(t, 3)
	before := s.files()
	path := filepath.Join(s.dir, "m.qcow2")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.merger().Merge(ended, disk.Merge{Below: []disk.Layer{s.image}, Layers: s.layers, Path: path}); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	damaged := slices.Clone(s.layers)
	damaged[1].Path = filepath.Join(t.TempDir(), "garbage.qcow2")
	if err := os.WriteFile(damaged[1].Path, []byte(strings.Repeat("garbage", 1000)), 0o400); err != nil {
		t.Fatal(err)
	}
	if err := s.merger().Merge(t.Context(), disk.Merge{Below: []disk.Layer{s.image}, Layers: damaged, Path: path}); err == nil {
		t.Error("a damaged layer was merged")
	}
	if err := s.merger().Merge(t.Context(), disk.Merge{Below: []disk.Layer{s.image}, Layers: s.layers[:1], Path: path}); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("one layer: %v", err)
	}
	if after := s.files(); !slices.Equal(before, after) {
		t.Errorf("files %v, before %v", after, before)
	}
}
