package sparse

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// plainDigest is the definition, over bytes in memory.
func plainDigest(disk []byte) string {
	h := sha256.New()
	h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(disk))))
	for i := 0; i*65536 < len(disk); i++ {
		block := disk[i*65536 : min((i+1)*65536, len(disk))]
		if bytes.Count(block, []byte{0}) == len(block) {
			continue
		}
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(i)))
		h.Write(block)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func openDisk(t *testing.T, disk []byte) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(disk); err != nil {
		t.Fatal(err)
	}
	return f
}

func blocks(t *testing.T, f *os.File) int64 {
	t.Helper()
	if err := f.Sync(); err != nil { // delayed allocation
		t.Fatal(err)
	}
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Blocks
}

// TestDiskDigest: the digest of a disk is that of its definition, holes or not,
// and digging holes changes no byte.
func TestDiskDigest(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, size := range []int{0, 1, 4095, 65536, 65537, 1 << 20, 3<<20 + 12345} {
		disk := make([]byte, size)
		for range size / 100000 {
			at := rng.IntN(size)
			for i := range min(rng.IntN(9000), size-at) {
				disk[at+i] = byte(rng.Int())
			}
		}
		if size > 0 {
			disk[size-1] = byte(size % 2)
		}
		f := openDisk(t, disk)
		want := plainDigest(disk)
		for _, state := range []string{"written", "dug"} {
			got, err := Digest(t.Context(), f)
			if err != nil || got != want {
				t.Errorf("%d bytes, %s: digest %s, %v; want %s", size, state, got, err, want)
			}
			if err := DigHoles(t.Context(), f); err != nil {
				t.Fatal(err)
			}
		}
		back, err := os.ReadFile(f.Name())
		if err != nil || !bytes.Equal(back, disk) {
			t.Errorf("%d bytes: digging holes changed them (%v)", size, err)
		}
	}
}

func TestDigHolesGivesSpaceBack(t *testing.T) {
	disk := make([]byte, 8<<20)
	disk[5<<20] = 1
	f := openDisk(t, disk)
	// Reserved space beyond what was written looks like a hole and is none.
	if err := syscall.Fallocate(int(f.Fd()), 0, 0, 16<<20); err != nil {
		t.Skipf("this file system reserves no space: %v", err)
	}
	before := blocks(t, f)
	if err := DigHoles(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	if after := blocks(t, f); before < 16<<20/512 || after > 64 {
		t.Errorf("%d blocks became %d; want all but a few given back", before, after)
	}
}

func TestDigestStopsWhenCanceled(t *testing.T) {
	f := openDisk(t, bytes.Repeat([]byte{1}, 1<<20))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Digest(ctx, f); err == nil {
		t.Error("Digest went on")
	}
}

// TestCopy: any range of a disk is copied byte for byte, and its holes too.
func TestCopy(t *testing.T) {
	disk := make([]byte, 8<<20+512)
	rng := rand.New(rand.NewPCG(3, 4))
	for range 20 {
		disk[rng.IntN(len(disk))] = byte(rng.IntN(255) + 1)
	}
	from := openDisk(t, disk)
	for _, r := range [][2]int{{0, len(disk)}, {17 * 512, 3 << 20}, {1 << 20, 0}, {8 << 20, 512}} {
		to := openDisk(t, nil)
		last := int64(-1)
		err := Copy(t.Context(), to, from, int64(r[0]), int64(r[1]), func(done int64) {
			if done <= last || done >= int64(r[1]) {
				t.Errorf("%d of %d are done after %d", done, r[1], last)
			}
			last = done
		})
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(to.Name())
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, disk[r[0]:r[0]+r[1]]) {
			t.Errorf("the copy of %v differs", r)
		}
		if n := blocks(t, to); n > 21*digestBlock/512 {
			t.Errorf("the copy of %v has %d blocks", r, n)
		}
	}
	to := openDisk(t, nil)
	for _, r := range [][2]int64{{1, int64(len(disk))}, {-1, 1}, {0, -1}, {1 << 62, 1 << 62}} {
		if err := Copy(t.Context(), to, from, r[0], r[1], nil); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("a copy of %v: %v", r, err)
		}
	}
}
