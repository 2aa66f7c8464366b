package tarstream_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/tarstream"
)

func allocated(t *testing.T, name string) int64 {
	t.Helper()
	fi, err := os.Lstat(name)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Sys().(*syscall.Stat_t).Blocks * 512
}

func TestSparse(t *testing.T) {
	dir := t.TempDir()
	src := filepath.Join(dir, "src")
	f, err := os.Create(src)
	if err != nil {
		t.Fatal(err)
	}
	content := map[int64]string{0: "begin", 5<<20 + 1: "middle", 800 << 20: "late"}
	for off, s := range content {
		if _, err := f.WriteAt([]byte(s), off); err != nil {
			t.Fatal(err)
		}
	}
	_ = f.Truncate(1<<30 + 7)
	_ = f.Close()
	if allocated(t, src) > 1<<20 {
		t.Skip("the file system of the temporary folder keeps no holes")
	}
	a := pack(t, src)
	if len(a) > 1<<20 {
		t.Errorf("the archive has %d bytes", len(a))
	}
	dst := filepath.Join(dir, "dst")
	if _, err := tarstream.UnpackAs(context.Background(), bytes.NewReader(a), dst, tarstream.Options{MaxBytes: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	fi, _ := os.Stat(dst)
	if fi.Size() != 1<<30+7 || allocated(t, dst) > 1<<20 {
		t.Errorf("%d bytes, %d allocated", fi.Size(), allocated(t, dst))
	}
	g, _ := os.Open(dst)
	defer g.Close()
	for off, s := range content {
		got := make([]byte, len(s)+10)
		_, _ = g.ReadAt(got, off)
		if string(got) != s+"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" {
			t.Errorf("at %d: %q", off, got)
		}
	}
	empty := filepath.Join(dir, "allhole")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_ = os.Truncate(empty, 1<<20)
	if _, err := tarstream.UnpackAs(context.Background(), bytes.NewReader(pack(t, empty)), dst, tarstream.Options{}); err != nil {
		t.Fatal(err)
	}
	if fi, _ := os.Stat(dst); fi.Size() != 1<<20 || allocated(t, dst) > 64<<10 {
		t.Errorf("a hole of 1 MiB: %d bytes, %d allocated", fi.Size(), allocated(t, dst))
	}
}

// TestZerosBecomeHoles with data at offsets that fit no block.
func TestZerosBecomeHoles(t *testing.T) {
	dir := t.TempDir()
	src, dst := filepath.Join(dir, "src"), filepath.Join(dir, "dst")
	content := make([]byte, 8<<20+123)
	for _, off := range []int{0, 4095, 4096, 1<<20 - 1, 3<<20 + 77, 8<<20 + 122} {
		content[off] = 1
	}
	if err := os.WriteFile(src, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := tarstream.UnpackAs(context.Background(), bytes.NewReader(pack(t, src)), dst, tarstream.Options{}); err != nil {
		t.Fatal(err)
	}
	got, _ := os.ReadFile(dst)
	if !bytes.Equal(got, content) {
		t.Error("the content differs")
	}
	if n := allocated(t, dst); n > 256<<10 {
		t.Errorf("%d bytes are allocated", n)
	}
}

func TestSpecialFilesAndOwners(t *testing.T) {
	src := filepath.Join(t.TempDir(), "d")
	if err := os.Mkdir(src, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(src+"/fifo", 0o620); err != nil {
		t.Fatal(err)
	}
	root := os.Geteuid() == 0
	if root {
		if err := unix.Mknod(src+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
			t.Logf("no device nodes here: %v", err)
			root = false
		}
		_ = os.Chmod(src+"/null", 0o666)
		write(t, src+"/owned", "x")
		_ = os.Chown(src+"/owned", 1234, 4321)
		_ = os.Chmod(src+"/owned", os.ModeSetuid|0o755)
	}
	dst := filepath.Join(t.TempDir(), "d")
	if _, err := tarstream.UnpackAs(context.Background(), bytes.NewReader(pack(t, src)), dst,
		tarstream.Options{Special: true, Owners: root}); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Lstat(dst + "/fifo"); err != nil || fi.Mode()&os.ModeNamedPipe == 0 {
		t.Errorf("fifo: %v, %v", fi, err)
	}
	if root {
		var st unix.Stat_t
		if err := unix.Lstat(dst+"/null", &st); err != nil || st.Rdev != unix.Mkdev(1, 3) || st.Mode != unix.S_IFCHR|0o666 {
			t.Errorf("null: %+v, %v", st, err)
		}
		if err := unix.Lstat(dst+"/owned", &st); err != nil || st.Uid != 1234 || st.Gid != 4321 || st.Mode&0o7777 != 0o4755 {
			t.Errorf("owned: %+v, %v", st, err)
		}
	}
	plain := filepath.Join(t.TempDir(), "d")
	res, err := tarstream.UnpackAs(context.Background(), bytes.NewReader(pack(t, src)), plain, tarstream.Options{})
	if err != nil || res.Skipped == 0 {
		t.Errorf("without special files: %+v, %v", res, err)
	}
	if fi, err := os.Stat(plain + "/owned"); root && (err != nil || fi.Mode()&os.ModeSetuid != 0) {
		t.Errorf("set-user-ID without its owner: %v, %v", fi, err)
	}
}

func TestDirect(t *testing.T) {
	for name, tail := range map[string]int{"whole": 0, "odd": 1234} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
			content := make([]byte, 6<<20+tail)
			_, _ = rand.NewChaCha8([32]byte{1}).Read(content)
			clear(content[1<<20+5000 : 2<<20+70_000]) // a hole that begins and ends within a unit
			clear(content[4<<20 : 4<<20+64<<10])
			if err := os.WriteFile(from, content, 0o600); err != nil {
				t.Fatal(err)
			}
			for round := range 2 { // with the page cache full and empty
				var archive bytes.Buffer
				if err := tarstream.PackDirect(t.Context(), &archive, from); err != nil {
					t.Fatal(err)
				}
				if _, err := tarstream.UnpackAs(t.Context(), &archive, to, tarstream.Options{Direct: true}); err != nil {
					t.Fatal(err)
				}
				got, err := os.ReadFile(to)
				if err != nil || !bytes.Equal(got, content) {
					t.Fatalf("round %d: the copy of %d bytes differs, %v", round, len(content), err)
				}
				dropCache(t, from)
			}
		})
	}
}

// dropCache makes the page cache forget a file.
func dropCache(t *testing.T, name string) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
}
