package dirty

import (
	"encoding/binary"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// A set in bytes, all numbers little-endian:
//
//	0   8 bytes  "HPPAGES\x01", the last one being the version
//	8   u64      number of pages of the memory, n
//	16  u64 × ⌈n/64⌉
//	             page p is bit p mod 64 of word p div 64; the bits behind the
//	             last page are 0
//
// Nothing follows.
const (
	setMagic  = "HPPAGES\x01"
	setHeader = len(setMagic) + 8
)

// maxSetPages bounds the memory of a set that is read: 1 TiB.
const maxSetPages = 1 << 40 / PageSize

// MarshalBinary gives the set in the form drawn above; it never fails.
func (s *Set) MarshalBinary() ([]byte, error) {
	b := make([]byte, 0, setHeader+8*len(s.words))
	b = append(b, setMagic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(s.pages))
	for _, w := range s.words {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return b, nil
}

// UnmarshalBinary makes s the set that MarshalBinary gave. Anything else is
// STORAGE, a newer version INCOMPATIBLE, and s stays as it was.
func (s *Set) UnmarshalBinary(b []byte) error {
	const version = len(setMagic) - 1
	if len(b) < setHeader || string(b[:version]) != setMagic[:version] {
		return errdefs.New(errdefs.Storage, "read page set: %d bytes that are none", len(b))
	}
	if b[version] != setMagic[version] {
		return errdefs.New(errdefs.Incompatible, "read page set: version %d, but this build knows only %d; use the newer holdpoint", b[version], setMagic[version])
	}
	pages := binary.LittleEndian.Uint64(b[len(setMagic):])
	words := b[setHeader:]
	if pages > maxSetPages || uint64(len(words)) != (pages+63)/64*8 {
		return errdefs.New(errdefs.Storage, "read page set: %d bytes cannot be a set of %d pages", len(b), pages)
	}
	set := NewSet(int64(pages) * PageSize)
	for i := range set.words {
		set.words[i] = binary.LittleEndian.Uint64(words[8*i:])
	}
	if rest := pages % 64; rest != 0 && set.words[len(set.words)-1]>>rest != 0 {
		return errdefs.New(errdefs.Storage, "read page set: it has pages behind the last of %d", pages)
	}
	*s = *set
	return nil
}
