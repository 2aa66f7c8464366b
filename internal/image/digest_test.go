package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
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
			got, err := diskDigest(t.Context(), f)
			if err != nil || got != want {
				t.Errorf("%d bytes, %s: digest %s, %v; want %s", size, state, got, err, want)
			}
			if err := digHoles(t.Context(), f); err != nil {
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
	if err := digHoles(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	if after := blocks(t, f); before < 16<<20/512 || after > 64 {
		t.Errorf("%d blocks became %d; want all but a few given back", before, after)
	}
}

func TestDigestsStopWhenCanceled(t *testing.T) {
	f := openDisk(t, bytes.Repeat([]byte{1}, 1<<20))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := diskDigest(ctx, f); err == nil {
		t.Error("diskDigest went on")
	}
	if _, err := fileDigest(ctx, f); err == nil {
		t.Error("fileDigest went on")
	}
}
