package sparse

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/test/session"
)

const mib = 1 << 20

// layouts are files to copy: their sizes, and where they have data.
var layouts = map[string]struct {
	size int64
	data [][2]int64
	// reserve is space that was reserved and never written.
	reserve int64
}{
	"empty":          {},
	"all hole":       {size: 64 * mib},
	"huge hole":      {size: 1 << 40, data: [][2]int64{{1<<39 + 4096, 4096}}},
	"ends in a hole": {size: 64 * mib, data: [][2]int64{{0, 8192}, {3 * mib, 2 * mib}}},
	"odd length":     {size: 5*mib + 1234, data: [][2]int64{{4096, 100}, {5*mib + 1000, 234}}},
	"no hole":        {size: 3 * mib, data: [][2]int64{{0, 3 * mib}}},
	"one byte":       {size: 1, data: [][2]int64{{0, 1}}},
	"reserved":       {size: 8 * mib, data: [][2]int64{{mib, 4096}}, reserve: 8 * mib},
	"many extents":   {size: 64 * mib, data: many(64 * mib)},
}

func many(size int64) (data [][2]int64) {
	for at := int64(8192); at < size-mib; at += 300 << 10 {
		data = append(data, [2]int64{at, 4096 + at%40000})
	}
	return data
}

func makeFile(t *testing.T, dir, name string) *os.File {
	t.Helper()
	l := layouts[name]
	f, err := os.Create(filepath.Join(dir, "from"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(l.size); err != nil {
		t.Fatal(err)
	}
	if l.reserve > 0 {
		if err := unix.Fallocate(int(f.Fd()), 0, 0, l.reserve); err != nil {
			t.Fatal(err)
		}
	}
	rng := rand.New(rand.NewPCG(5, 6))
	for _, d := range l.data {
		b := make([]byte, d[1])
		for i := range b {
			b[i] = byte(rng.Int()) | 1
		}
		if _, err := f.WriteAt(b, d[0]); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func emptyFile(t *testing.T, dir string) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "to"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// extents are the parts of a file that are no holes.
func extents(t *testing.T, f *os.File) (list [][2]int64) {
	t.Helper()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	err = eachExtent(t.Context(), f, 0, info.Size(), func(data, hole int64) error {
		list = append(list, [2]int64{data, hole})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// checkSame compares size, holes and data of two files.
func checkSame(t *testing.T, to, from *os.File, holes bool) {
	t.Helper()
	a, err := to.Stat()
	if err != nil {
		t.Fatal(err)
	}
	b, err := from.Stat()
	if err != nil || a.Size() != b.Size() {
		t.Fatalf("the copy has %d bytes, not %d (%v)", a.Size(), b.Size(), err)
	}
	want := extents(t, from)
	if got := extents(t, to); holes && !reflect.DeepEqual(got, want) {
		t.Errorf("the copy has data at %v, want %v", got, want)
	}
	for _, list := range [][][2]int64{want, extents(t, to)} { // what is a hole in one may be zeros in the other
		for _, e := range list {
			x, y := make([]byte, e[1]-e[0]), make([]byte, e[1]-e[0])
			for f, into := range map[*os.File][]byte{to: x, from: y} {
				if _, err := f.ReadAt(into, e[0]); err != nil && !errors.Is(err, io.EOF) {
					t.Fatal(err)
				}
			}
			if !bytes.Equal(x, y) {
				t.Fatalf("the copy differs in %v", e)
			}
		}
	}
}

// copyAll copies every layout from one folder to another.
func copyAll(t *testing.T, to, from string, way Way) {
	t.Helper()
	for name := range layouts {
		t.Run(name, func(t *testing.T) {
			source, target := makeFile(t, from, name), emptyFile(t, to)
			last, total := int64(-1), int64(-1)
			got, err := CopyFile(t.Context(), target, source, func(done, of int64) {
				if done < last || done > of {
					t.Errorf("%d of %d are done after %d", done, of, last)
				}
				last, total = done, of
			})
			if err != nil || got != way {
				t.Fatalf("copied by %q, %v; want %q", got, err, way)
			}
			if last != total {
				t.Errorf("the last progress is %d of %d", last, total)
			}
			checkSame(t, target, source, way == Read && from == to)
		})
	}
}

// TestCopyFile copies on the usual file system of tests, which clones nothing.
func TestCopyFile(t *testing.T) {
	dir := t.TempDir()
	probe := makeFile(t, dir, "no hole")
	n, err := CopyBytes(probe, dir)
	if err != nil {
		t.Fatal(err)
	}
	if n == 0 {
		t.Skip("the file system of temporary files clones")
	}
	if took := blocks(t, probe) * 512; n > took+mib || n < 3*mib {
		t.Errorf("a copy of %d bytes would take %d", took, n)
	}
	copyAll(t, dir, dir, Read)
}

// mounted gives a folder on a new file system in a file, of the size in MiB; the
// test is in a mount namespace of its own.
func mounted(t *testing.T, kind, size string) string {
	t.Helper()
	if _, err := exec.LookPath("mkfs." + kind); err != nil {
		t.Skipf("mkfs.%s is not installed", kind)
	}
	dir := t.TempDir()
	image, at := filepath.Join(dir, "image"), filepath.Join(dir, "at")
	if err := os.Mkdir(at, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, command := range [][]string{
		{"truncate", "-s", size + "M", image},
		{"mkfs." + kind, "-q", image},
		{"mount", "-o", "loop", image, at},
	} {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			if command[0] == "mount" {
				t.Skipf("this host mounts no %s: %v: %s", kind, err, out)
			}
			t.Fatalf("%q: %v: %s", command, err, out)
		}
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", at).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
	return at
}

// TestCopyClones: where the file system can, a copy takes no space and is
// independent; from another file system its data is copied.
func TestCopyClones(t *testing.T) {
	if !session.InOwnMounts(t, 3*time.Minute) {
		return
	}
	for kind, size := range map[string]string{"xfs": "400", "btrfs": "200"} {
		t.Run(kind, func(t *testing.T) {
			at := mounted(t, kind, size)
			copyAll(t, at, at, Cloned)
			source, target := makeFile(t, at, "no hole"), emptyFile(t, at)
			if err := source.Sync(); err != nil {
				t.Fatal(err)
			}
			if n, err := CopyBytes(source, at); err != nil || n != 0 {
				t.Errorf("a clone would take %d bytes, %v", n, err)
			}
			if _, err := CopyFile(t.Context(), target, source, func(int64, int64) {}); err != nil {
				t.Fatal(err)
			}
			want := make([]byte, 8)
			if _, err := target.ReadAt(want, mib); err != nil {
				t.Fatal(err)
			}
			if _, err := source.WriteAt(make([]byte, 8), mib); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, 8)
			if _, err := target.ReadAt(got, mib); err != nil || !bytes.Equal(got, want) {
				t.Errorf("a write to the source changed the clone to %x, %v", got, err)
			}
			t.Run("from another", func(t *testing.T) { copyAll(t, at, t.TempDir(), Read) })
		})
	}
}

// TestCopyWithoutRoom ends with NO_SPACE.
func TestCopyWithoutRoom(t *testing.T) {
	if !session.InOwnMounts(t, time.Minute) {
		return
	}
	at := mounted(t, "ext4", "16")
	source, err := os.Create(filepath.Join(t.TempDir(), "from"))
	if err != nil {
		t.Fatal(err)
	}
	defer source.Close()
	if _, err := source.Write(bytes.Repeat([]byte{1}, 32*mib)); err != nil {
		t.Fatal(err)
	}
	if _, err := CopyFile(t.Context(), emptyFile(t, at), source, func(int64, int64) {}); !errdefs.Is(err, errdefs.NoSpace) {
		t.Errorf("a copy that does not fit: %v", err)
	}
}

// disturbed copies a file of data and calls disturb once, amid it.
func disturbed(t *testing.T, ctx context.Context, disturb func(from *os.File)) (done int64, err error) {
	t.Helper()
	dir := t.TempDir()
	source, err := os.Create(filepath.Join(dir, "from"))
	if err != nil {
		t.Fatal(err)
	}
	defer source.Close()
	if _, err := source.Write(bytes.Repeat([]byte{1}, 8*mib)); err != nil {
		t.Fatal(err)
	}
	if n, _ := CopyBytes(source, dir); n == 0 {
		t.Skip("a clone is made at once")
	}
	once := false
	_, err = CopyFile(ctx, emptyFile(t, dir), source, func(n, _ int64) {
		if done = n; !once {
			once = true
			disturb(source)
		}
	})
	return done, err
}

func TestCopyThatIsDisturbed(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	if done, err := disturbed(t, ctx, func(*os.File) { cancel() }); !errors.Is(err, context.Canceled) || done > copyBuffer {
		t.Errorf("canceled after the first piece it copied %d bytes, %v", done, err)
	}
	_, err := disturbed(t, t.Context(), func(f *os.File) {
		if _, err := f.WriteAt([]byte{2}, 0); err != nil {
			t.Error(err)
		}
		// A time of change may be as coarse as 10 ms: say that it was later.
		if err := os.Chtimes(f.Name(), time.Now(), time.Now().Add(time.Second)); err != nil {
			t.Error(err)
		}
	})
	if !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("written to meanwhile: %v", err)
	}
	_, err = disturbed(t, t.Context(), func(f *os.File) {
		if err := f.Truncate(mib + 5); err != nil {
			t.Error(err)
		}
	})
	if !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("cut short meanwhile: %v", err)
	}
	// It had no holes; now the rest of it is one.
	_, err = disturbed(t, t.Context(), func(f *os.File) {
		if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 2*mib, 6*mib); err != nil {
			t.Error(err)
		}
		if err := os.Chtimes(f.Name(), time.Now(), time.Now().Add(time.Second)); err != nil {
			t.Error(err)
		}
	})
	if !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("emptied meanwhile: %v", err)
	}
}

// TestDigestFile: the digest of a copy is that of what was copied, whatever is a
// hole in which, and says what kind it is.
func TestDigestFile(t *testing.T) {
	dir := t.TempDir()
	source := makeFile(t, dir, "huge hole")
	target := emptyFile(t, dir)
	if _, err := CopyFile(t.Context(), target, source, func(int64, int64) {}); err != nil {
		t.Fatal(err)
	}
	want, _, err := DigestFile(t.Context(), source.Name())
	if err != nil {
		t.Fatal(err)
	}
	got, _, err := DigestFile(t.Context(), target.Name())
	if err != nil || got != want || got[:12] != "disk-sha256:" {
		t.Errorf("digests %s and %s, %v", want, got, err)
	}
	if _, _, err := DigestFile(t.Context(), filepath.Join(dir, "none")); !errdefs.Is(err, errdefs.Storage) {
		t.Errorf("no file: %v", err)
	}
}
