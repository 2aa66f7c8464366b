package main

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	pageBytes   = 4096
	memoryBytes = 64 << 20
	// burst pages are changed at a time: 1 MiB a second.
	burst      = 8
	changePace = burst * pageBytes * time.Second / (1 << 20)
)

// memory is changed page by page. What it should be is kept elsewhere: the
// version of each page, and the sum of the digests of all.
type memory struct {
	mu       sync.Mutex
	data     []byte
	versions []uint64
	sum      uint64
	changes  uint64
}

func newMemory(bytes int) (*memory, error) {
	data, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	m := &memory{data: data, versions: make([]uint64, bytes/pageBytes)}
	for i := range m.versions {
		fillPage(m.page(i), uint64(i), 0)
		m.sum += pageDigest(m.page(i))
	}
	return m, nil
}

func startMemory() (*memory, error) {
	m, err := newMemory(memoryBytes)
	if err == nil {
		go m.keepChanging()
	}
	return m, err
}

func (m *memory) page(i int) []byte { return m.data[i*pageBytes : (i+1)*pageBytes] }

// fillPage writes what page i has in its version: both numbers, then noise of them.
func fillPage(p []byte, i, version uint64) {
	binary.LittleEndian.PutUint64(p, i)
	binary.LittleEndian.PutUint64(p[8:], version)
	state := i*0x9e3779b97f4a7c15 ^ version*lcgFactor
	for o := 16; o < len(p); o += 8 {
		state = state*lcgFactor + lcgAdd
		binary.LittleEndian.PutUint64(p[o:], state^state>>29)
	}
}

// pageDigest depends on each word and its place (FNV-1a over words).
func pageDigest(p []byte) uint64 {
	d := uint64(14695981039346656037)
	for o := 0; o < len(p); o += 8 {
		d = (d ^ binary.LittleEndian.Uint64(p[o:])) * 1099511628211
		d ^= d >> 32
	}
	return d
}

func (m *memory) keepChanging() {
	random := rand.New(rand.NewPCG(1, 2))
	for {
		for range burst {
			m.change(random.IntN(len(m.versions)))
		}
		time.Sleep(changePace)
	}
}

func (m *memory) change(i int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.page(i)
	m.sum -= pageDigest(p)
	m.versions[i]++
	fillPage(p, uint64(i), m.versions[i])
	m.sum += pageDigest(p)
	m.changes++
}

// report digests all of it again.
func (m *memory) report(r *Report) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	r.Changes = m.changes
	r.Digest = fmt.Sprintf("%016x", m.sum)
	sum, versions := uint64(0), uint64(0)
	for i, version := range m.versions {
		p := m.page(i)
		if is, has := binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:]); is != uint64(i) || has != version {
			return fmt.Errorf("memory page %d should have version %d, but has version %d of page %d", i, version, has, is)
		}
		sum += pageDigest(p)
		versions += version
	}
	if sum != m.sum || versions != m.changes {
		return fmt.Errorf("memory has digest %016x after %d changes, should have %016x after %d", sum, versions, m.sum, m.changes)
	}
	return nil
}
