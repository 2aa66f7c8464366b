package source

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/image/source/sourcetest"
)

const mib = 1 << 20

// resum makes a changed table's digests right again.
func resum(head []byte) []byte {
	h, le := head[sector:2*sector], binary.LittleEndian
	first, n := le.Uint64(h[72:])*sector, uint64(le.Uint32(h[80:]))*uint64(le.Uint32(h[84:]))
	if first+n > first && first+n <= uint64(len(head)) {
		le.PutUint32(h[88:], crc32.ChecksumIEEE(head[first:first+n]))
	}
	if length := le.Uint32(h[12:]); length <= sector {
		le.PutUint32(h[16:], 0)
		le.PutUint32(h[16:], crc32.ChecksumIEEE(h[:length]))
	}
	return head
}

func TestParseGPT(t *testing.T) {
	const size = 64 * mib
	good := sourcetest.GPT(size,
		sourcetest.Partition{Number: 1, Type: sourcetest.Root, Name: "root\nü", Offset: 8 * mib, Size: 55 * mib},
		sourcetest.Partition{Number: 128, Type: sourcetest.EFI, Offset: mib, Size: 512})
	parts, err := parseGPT(good, size)
	if err != nil {
		t.Fatal(err)
	}
	want := []partition{
		{number: 1, kind: typeRoot, name: "rootü", offset: 8 * mib, size: 55 * mib},
		{number: 128, kind: sourcetest.EFI, offset: mib, size: 512},
	}
	if len(parts) != 2 || parts[0] != want[0] || parts[1] != want[1] {
		t.Errorf("%+v, want %+v", parts, want)
	}
	le := binary.LittleEndian
	for name, c := range map[string]struct {
		change func(head []byte)
		says   string
	}{
		"header":  {func(h []byte) { h[sector+57]++ }, "damaged"},
		"table":   {func(h []byte) { h[2*sector+57]++ }, "damaged"},
		"length":  {func(h []byte) { le.PutUint32(h[sector+12:], 1<<31) }, "length"},
		"count":   {func(h []byte) { le.PutUint32(h[sector+80:], 1<<31); resum(h) }, "entries"},
		"entry":   {func(h []byte) { le.PutUint32(h[sector+84:], 0); resum(h) }, "entries"},
		"product": {func(h []byte) { le.PutUint32(h[sector+80:], 512); le.PutUint32(h[sector+84:], 4096); resum(h) }, "entries"},
		"place":   {func(h []byte) { le.PutUint64(h[sector+72:], 1<<63); resum(h) }, "within"},
		"end":     {func(h []byte) { le.PutUint64(h[2*sector+40:], size/sector); resum(h) }, "partition 1 .*complete"},
		"reverse": {func(h []byte) { le.PutUint64(h[2*sector+32:], 1<<62); resum(h) }, "partition 1"},
	} {
		head := bytes.Clone(good)
		c.change(head)
		word, _, _ := strings.Cut(c.says, " .*")
		if parts, err := parseGPT(head, size); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v, %v; want %q", name, parts, err, c.says)
		}
	}
}

// FuzzParseGPT: whatever a table says, what is taken of it is within the disk.
func FuzzParseGPT(f *testing.F) {
	good := sourcetest.GPT(64*mib, sourcetest.Partition{Number: 1, Type: sourcetest.Linux, Name: "x", Offset: mib, Size: mib})
	f.Add(good[sector:2*sector], good[2*sector:][:256], int64(64*mib), true)
	f.Add(good[sector:2*sector], good[2*sector:][:256], int64(1), false)
	f.Fuzz(func(t *testing.T, header, table []byte, size int64, sums bool) {
		head := make([]byte, 128<<10)
		copy(head[sector:2*sector], header)
		copy(head[2*sector:], table)
		if sums {
			resum(head)
		}
		parts, err := parseGPT(head, max(size, 0))
		if err != nil {
			return
		}
		if len(parts) > maxEntries {
			t.Errorf("%d partitions", len(parts))
		}
		for _, p := range parts {
			if p.offset < 0 || p.size <= 0 || p.offset > size-p.size || p.number < 1 {
				t.Errorf("partition %+v of a disk of %d bytes", p, size)
			}
		}
	})
}

// FuzzParseSuper: a file system is never larger than what it is in.
func FuzzParseSuper(f *testing.F) {
	block := func(blocks, shift, compatible, incompatible, high uint32) []byte {
		b, le := make([]byte, 340), binary.LittleEndian
		le.PutUint16(b[56:], 0xef53)
		for at, v := range map[int]uint32{4: blocks, 24: shift, 92: compatible, 96: incompatible, 224: 8, 336: high} {
			le.PutUint32(b[at:], v)
		}
		return b
	}
	f.Add(block(100, 2, 4, 0, 0), int64(mib))
	f.Add(block(1<<31, 2, 4, 0x84, 1<<31), int64(1<<62))
	f.Add(block(1<<31, 1<<31, 0, 8, 0), int64(0))
	f.Fuzz(func(t *testing.T, block []byte, room int64) {
		head := make([]byte, superBytes)
		copy(head[1024:], block)
		s, err := parseSuper(head, max(room, 0))
		if err == nil && (s.bytes <= 0 || s.bytes > room) {
			t.Errorf("%+v in %d bytes", s, room)
		}
	})
}
