package source

import (
	"encoding/binary"
	"errors"
)

// superBytes is how much of a file system's beginning has its superblock.
const superBytes = 2048

// super is what matters of an ext4 superblock (the kernel's
// Documentation/filesystems/ext4/super.rst).
type super struct {
	// bytes is the size of the file system.
	bytes int64
	// unclean is one that was not unmounted: its journal, or the list of files
	// that were deleted while open, has something to do.
	unclean bool
}

// isExt reports whether what begins with head is an ext2, ext3 or ext4 file
// system.
func isExt(head []byte) bool {
	return len(head) >= superBytes && binary.LittleEndian.Uint16(head[1024+56:]) == 0xef53
}

// parseSuper reads the superblock of a file system that begins with head and
// has room bytes at most. It may be hostile.
func parseSuper(head []byte, room int64) (super, error) {
	if !isExt(head) {
		return super{}, errors.New("it is no ext4 file system")
	}
	const (
		hasJournal    = 0x4  // compatible feature
		needsRecovery = 0x4  // incompatible ones
		isJournal     = 0x8  // a journal of another file system
		wide          = 0x80 // more than 2³² blocks
		maxBlockShift = 2    // 4 KiB: the kernel mounts none larger than a page
	)
	b := head[1024:superBytes]
	u32 := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	shift, compatible, incompatible := u32(24), u32(92), u32(96)
	blocks := uint64(u32(4))
	if incompatible&wide != 0 {
		blocks |= uint64(u32(336)) << 32
	}
	switch {
	case incompatible&isJournal != 0, compatible&hasJournal != 0 && u32(224) == 0:
		return super{}, errors.New("its journal is on another device")
	case shift > maxBlockShift:
		return super{}, errors.New("its blocks are larger than 4 KiB, which x86-64 cannot mount")
	case blocks == 0 || blocks > uint64(room)>>(10+shift):
		return super{}, errors.New("the file system is larger than what it is in; is the file complete?")
	}
	return super{
		bytes:   int64(blocks) << (10 + shift),
		unclean: incompatible&needsRecovery != 0 || binary.LittleEndian.Uint16(b[58:])&1 == 0 || u32(232) != 0,
	}, nil
}
