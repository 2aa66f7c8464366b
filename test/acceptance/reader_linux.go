package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	blocksBytes = 16 << 20
	readPages   = 16
	readPace    = 5 * time.Millisecond
	// dropEvery reads the kernel is told to drop what it has cached.
	dropEvery = 500
)

// reader reads one file again and again, in turns past the page cache, where
// the device writes into its own memory, and through it.
type reader struct {
	trouble
	mu             sync.Mutex
	direct, cached uint64
}

func startReader(path string) (part, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	page := make([]byte, pageBytes)
	for i := range uint64(blocksBytes / pageBytes) {
		fillPage(page, i, diskVersion)
		if _, err := f.Write(page); err != nil {
			return nil, errors.Join(err, f.Close())
		}
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return nil, err
	}
	direct, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s past the cache: %w", path, err)
	}
	cached, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	// Page-aligned, as O_DIRECT wants it.
	buffer, err := unix.Mmap(-1, 0, readPages*pageBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	r := &reader{}
	go r.read(direct, cached, buffer)
	return r, nil
}

// diskVersion tells the file's pages from those of memory.
const diskVersion = 1 << 40

func (r *reader) read(direct, cached int, buffer []byte) {
	random := rand.New(rand.NewPCG(3, 4))
	want := make([]byte, pageBytes)
	for n := 0; ; n++ {
		fd, count := direct, &r.direct
		if n%2 == 1 {
			fd, count = cached, &r.cached
		}
		first := random.IntN(blocksBytes/pageBytes - readPages)
		got, err := unix.Pread(fd, buffer, int64(first)*pageBytes)
		if err != nil || got != len(buffer) {
			r.set(fmt.Errorf("read the disk: %d bytes: %w", got, err))
			return
		}
		for i := range readPages {
			fillPage(want, uint64(first+i), diskVersion)
			if !bytes.Equal(want, buffer[i*pageBytes:(i+1)*pageBytes]) {
				r.set(fmt.Errorf("page %d of the disk is not what was written (read %d, past the cache: %v)", first+i, n, n%2 == 0))
			}
		}
		if n%dropEvery == 0 {
			if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0); err != nil {
				r.set(fmt.Errorf("drop the caches: %w", err))
			}
		}
		r.mu.Lock()
		*count++
		r.mu.Unlock()
		time.Sleep(readPace)
	}
}

func (r *reader) report(report *Report) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	report.DirectReads, report.CachedReads = r.direct, r.cached
	return r.get()
}
