package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
)

const (
	heldMemory = 8 << 20
	heldDisk   = 4 << 20
	// heldWrites pages of each are written at a time.
	heldWrites = 64
)

// Held are the digests of what is held: equal when and only when the same was
// written in the same order.
type Held struct {
	Memory string `json:"memory"`
	Disk   string `json:"disk"`
}

// hold changes nothing unless told to, and answers
//
//	write SEED  changes pages of its memory and of its file, which are those of the seed
//	digest      Held, each byte read again, the file from the disk
//	draw        32 bytes of getrandom(2), hexadecimal
func hold(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	m, err := newMemory(heldMemory)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, "held"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(heldDisk), f.Sync()); err != nil {
		return err
	}
	return serve(dir, func(command, argument string) (string, error) {
		switch command {
		case "write":
			seed, err := strconv.ParseUint(argument, 10, 64)
			if err != nil {
				return "", err
			}
			return "written", heldWrite(m, f, seed)
		case "digest":
			return heldDigest(m, f)
		case "draw":
			return draw(32)
		}
		return "", fmt.Errorf("unknown command %q", command)
	})
}

func heldWrite(m *memory, f *os.File, seed uint64) error {
	random := rand.New(rand.NewPCG(seed, 0))
	page := make([]byte, pageBytes)
	for range heldWrites {
		m.change(random.IntN(len(m.versions)))
		i := random.IntN(heldDisk / pageBytes)
		fillPage(page, uint64(i), seed)
		if _, err := f.WriteAt(page, int64(i)*pageBytes); err != nil {
			return err
		}
	}
	// What the page cache has is in a full checkpoint, but in no disk checkpoint.
	return f.Sync()
}

func heldDigest(m *memory, f *os.File) (string, error) {
	var r Report
	if err := m.report(&r); err != nil {
		return "", err
	}
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0); err != nil {
		return "", err
	}
	content, err := os.ReadFile(f.Name())
	if err != nil {
		return "", err
	}
	sum := uint64(0)
	for i := 0; i < len(content); i += pageBytes {
		p := content[i : i+pageBytes]
		if !bytes.Equal(p, make([]byte, pageBytes)) {
			sum += pageDigest(p)
		}
	}
	text, err := json.Marshal(Held{Memory: r.Digest, Disk: fmt.Sprintf("%016x", sum)})
	return string(text), err
}
