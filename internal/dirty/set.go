package dirty

import (
	"fmt"
	"iter"
	"math/bits"
)

// PageSize is the size of a page in bytes. Larger pages of the host are
// reported as several of these.
const PageSize = 4096

// Set is a set of a guest's pages: one bit for each, so 512 KiB for 16 GiB of
// memory, and joining two such sets takes some 20 µs. It is not safe for use by
// several goroutines.
type Set struct {
	pages int64
	words []uint64
}

// NewSet returns the empty set for a memory of so many bytes, which is a
// multiple of PageSize.
func NewSet(memoryBytes int64) *Set {
	pages := memoryBytes / PageSize
	return &Set{pages: pages, words: make([]uint64, (pages+63)/64)}
}

// MemoryBytes is the size of the memory that the set is about.
func (s *Set) MemoryBytes() int64 { return s.pages * PageSize }

// Add puts the pages first … first+count-1 into the set. Pages that the
// memory does not have are our own bug, and it panics.
func (s *Set) Add(first, count int64) {
	if first < 0 || count < 0 || first > s.pages-count {
		panic(fmt.Sprintf("dirty: pages %d+%d are not in a memory of %d", first, count, s.pages))
	}
	for end := first + count; first < end; {
		word, bit := first/64, first%64
		n := min(64-bit, end-first)
		s.words[word] |= (^uint64(0) >> (64 - n)) << bit
		first += n
	}
}

// Or adds all pages of o, a set of the same memory.
func (s *Set) Or(o *Set) {
	s.same(o)
	for i, w := range o.words {
		s.words[i] |= w
	}
}

// And removes all pages that are not in o, a set of the same memory.
func (s *Set) And(o *Set) {
	s.same(o)
	for i, w := range o.words {
		s.words[i] &= w
	}
}

// Remove removes all pages of o, a set of the same memory.
func (s *Set) Remove(o *Set) {
	s.same(o)
	for i, w := range o.words {
		s.words[i] &^= w
	}
}

// same panics when o is a set of another memory, which is our own bug.
func (s *Set) same(o *Set) {
	if o.pages != s.pages {
		panic(fmt.Sprintf("dirty: a set of %d pages meets one of %d", s.pages, o.pages))
	}
}

// Has reports whether the page is in the set.
func (s *Set) Has(page int64) bool {
	return page >= 0 && page < s.pages && s.words[page/64]&(1<<(page%64)) != 0
}

// Len is the number of pages in the set.
func (s *Set) Len() int64 {
	n := 0
	for _, w := range s.words {
		n += bits.OnesCount64(w)
	}
	return int64(n)
}

// Bytes is the size of the pages in the set.
func (s *Set) Bytes() int64 { return s.Len() * PageSize }

// Clone returns a copy of its own.
func (s *Set) Clone() *Set {
	return &Set{pages: s.pages, words: append([]uint64(nil), s.words...)}
}

// Clear empties the set.
func (s *Set) Clear() { clear(s.words) }

// Runs gives the set as runs of neighboring pages, ascending, each as its
// offset and length in bytes.
func (s *Set) Runs() iter.Seq2[int64, int64] {
	return func(yield func(offset, length int64) bool) {
		for page := s.next(0, false); page < s.pages; {
			end := s.next(page, true)
			if !yield(page*PageSize, (end-page)*PageSize) {
				return
			}
			page = s.next(end, false)
		}
	}
}

// next finds the first page from page on that is in the set, or with absent
// the first that is not; s.pages if there is none.
func (s *Set) next(page int64, absent bool) int64 {
	for page < s.pages {
		w := s.words[page/64]
		if absent {
			w = ^w
		}
		if w >>= page % 64; w != 0 {
			return min(page+int64(bits.TrailingZeros64(w)), s.pages)
		}
		page = (page/64 + 1) * 64
	}
	return s.pages
}
