package source

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"strings"
	"unicode"
	"unicode/utf16"
)

// sector is the size of the blocks that partition tables count in, in bytes;
// disks with others are not read.
const sector = 512

// headBytes is how much of a disk's beginning is looked at.
const headBytes = 1 << 20

// maxEntries and maxTable bound a partition table: 128 entries of 128 bytes are
// usual.
const (
	maxEntries = 512
	maxTable   = 128 << 10
)

// Types of partitions, as Linux says them (The Discoverable Partitions
// Specification).
const (
	typeRoot  = "4f68bce3-e8cd-4db1-96e7-fbcaf984b709" // root of x86-64
	typeLinux = "0fc63daf-8483-4772-8e79-3d69d8477de4" // Linux file system
	typeBoot  = "bc13c2ff-59e6-4262-a352-b275fd6f7172" // extended boot loader: /boot
)

// partition is a range of a disk.
type partition struct {
	// number counts from 1, as /dev/sda1 does; 0 is a disk without a table.
	number int
	kind   string
	name   string
	// offset and size are in bytes.
	offset, size int64
}

// String is the partition for people.
func (p partition) String() string {
	if p.number == 0 {
		return "the disk"
	}
	size := fmt.Sprintf("%d MiB", p.size>>20)
	if p.name == "" {
		return fmt.Sprintf("partition %d (%s)", p.number, size)
	}
	return fmt.Sprintf("partition %d (%q, %s)", p.number, p.name, size)
}

// isGPT reports whether a disk that begins with head has a GUID partition table.
func isGPT(head []byte) bool {
	return len(head) >= 2*sector && string(head[sector:sector+8]) == "EFI PART"
}

// parseGPT reads the partition table of a disk of size bytes that begins with
// head (UEFI Specification, GUID Partition Table). It may be hostile.
func parseGPT(head []byte, size int64) ([]partition, error) {
	if !isGPT(head) {
		return nil, errors.New("it has no GUID partition table")
	}
	h := head[sector : 2*sector]
	u32, u64 := binary.LittleEndian.Uint32, binary.LittleEndian.Uint64
	length := u32(h[12:])
	if length < 92 || length > sector {
		return nil, errors.New("the header of its partition table has a wrong length")
	}
	own := bytes.Clone(h[:length])
	clear(own[16:20])
	if crc32.ChecksumIEEE(own) != u32(h[16:]) {
		return nil, errors.New("the header of its partition table is damaged")
	}
	first, count, each := u64(h[72:]), u32(h[80:]), u32(h[84:])
	if count > maxEntries || each < 128 || each > maxTable || uint64(count)*uint64(each) > maxTable {
		return nil, fmt.Errorf("its partition table has more than %d entries or longer ones than are known", maxEntries)
	}
	table := uint64(count) * uint64(each)
	if first < 2 || first > uint64(len(head))/sector || first*sector+table > uint64(len(head)) {
		return nil, fmt.Errorf("its partition table is not within its first %d bytes", headBytes)
	}
	entries := head[first*sector : first*sector+table]
	if crc32.ChecksumIEEE(entries) != u32(h[88:]) {
		return nil, errors.New("its partition table is damaged")
	}
	var all []partition
	for i := range int(count) {
		e := entries[i*int(each):][:each]
		if bytes.Equal(e[:16], make([]byte, 16)) {
			continue
		}
		begin, end := u64(e[32:]), u64(e[40:])
		if begin > end || end >= uint64(size)/sector {
			return nil, fmt.Errorf("partition %d is not within the disk of %d bytes; is the file complete?", i+1, size)
		}
		all = append(all, partition{
			number: i + 1, kind: guid(e), name: label(e[56:128]),
			offset: int64(begin) * sector, size: int64(end-begin+1) * sector,
		})
	}
	return all, nil
}

// guid is the text of one, whose first three numbers are little-endian.
func guid(b []byte) string {
	return fmt.Sprintf("%08x-%04x-%04x-%x-%x", binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint16(b[4:]),
		binary.LittleEndian.Uint16(b[6:]), b[8:10], b[10:16])
}

// label is the printable part of a name in UTF-16.
func label(b []byte) string {
	var units []uint16
	for ; len(b) >= 2; b = b[2:] {
		u := binary.LittleEndian.Uint16(b)
		if u == 0 {
			break
		}
		units = append(units, u)
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return -1
	}, string(utf16.Decode(units)))
}
