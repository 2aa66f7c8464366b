// Package sparse copies large files that are mostly holes, digests them, and digs
// holes where they have zeros. It never reads a hole to copy it, and knows nothing
// of what is in the files.
package sparse

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// digestBlock is the block of the disk digest; part of its definition.
const digestBlock = 64 << 10

// holeBlock is the smallest hole that is worth digging: a block of the host's
// file system.
const holeBlock = 4 << 10

// Digest is the sha256 by which a disk is identified: of
//
//	8 bytes   size of the disk, big-endian
//	then, for each 64 KiB block that holds a byte other than zero, ascending:
//	8 bytes   number of the block, counted from 0, big-endian
//	n bytes   the block's content; n is 65536, for the disk's last block the rest
//
// So it depends on content and size alone, not on where the host's file system
// keeps holes, and holes are never read.
func Digest(ctx context.Context, f *os.File) (string, error) {
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	var word [8]byte
	binary.BigEndian.PutUint64(word[:], uint64(info.Size()))
	h.Write(word[:])
	err = eachBlock(ctx, f, 0, info.Size(), func(offset int64, block []byte) error {
		if zero(block) {
			return nil
		}
		binary.BigEndian.PutUint64(word[:], uint64(offset/digestBlock))
		h.Write(word[:])
		h.Write(block)
		return nil
	})
	if err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// DigHoles makes holes of all of f that is zero, in whole blocks of holeBlock:
// what was written as zeros, and what was only reserved. A file system without
// holes is left alone.
func DigHoles(ctx context.Context, f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	// Between data up to clean and the next data there are zeros.
	clean := int64(0)
	dig := func(end int64) error {
		if clean >= end {
			return nil
		}
		return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, clean, end-clean)
	}
	err = eachBlock(ctx, f, 0, info.Size(), func(offset int64, block []byte) error {
		for len(block) > 0 {
			n := min(holeBlock, len(block))
			if !zero(block[:n]) {
				if err := dig(offset); err != nil {
					return err
				}
				clean = offset + int64(n)
			}
			block, offset = block[n:], offset+int64(n)
		}
		return nil
	})
	if err == nil {
		err = dig(info.Size())
	}
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

// Copy writes what from has in [offset, offset+size) to the beginning of to,
// which is empty, and leaves holes where from has them or whole blocks of zeros.
// A file that ends before is io.ErrUnexpectedEOF. done is called with how many
// bytes of the range are behind it.
func Copy(ctx context.Context, to, from *os.File, offset, size int64, done func(int64)) error {
	info, err := from.Stat()
	if err != nil {
		return err
	}
	if offset < 0 || size < 0 || offset > info.Size()-size {
		return io.ErrUnexpectedEOF
	}
	if err := to.Truncate(size); err != nil {
		return err
	}
	return eachBlock(ctx, from, offset, offset+size, func(at int64, block []byte) error {
		if done != nil {
			done(at - offset)
		}
		if zero(block) {
			return nil
		}
		_, err := to.WriteAt(block, at-offset)
		return err
	})
}

// eachBlock calls fn for every block of digestBlock bytes, counted from begin,
// of f's bytes in [begin, end) that touches data, ascending; the last block may
// be shorter. The block is fn's until it returns.
func eachBlock(ctx context.Context, f *os.File, begin, end int64, fn func(offset int64, block []byte) error) error {
	buf := make([]byte, digestBlock)
	next := begin
	return eachExtent(ctx, f, begin, end, func(data, hole int64) error {
		// The last block may reach into this extent.
		for next = max(next, data-(data-begin)%digestBlock); next < hole; next += digestBlock {
			if err := ctx.Err(); err != nil {
				return err
			}
			block := buf[:min(digestBlock, end-next)]
			if _, err := f.ReadAt(block, next); err != nil {
				return err
			}
			if err := fn(next, block); err != nil {
				return err
			}
		}
		return nil
	})
}

// eachExtent calls fn for every part [data, hole) of f's bytes in [begin, end)
// that is not a hole, ascending. Where the file system knows no holes that is
// all of it.
func eachExtent(ctx context.Context, f *os.File, begin, end int64, fn func(data, hole int64) error) error {
	for offset := begin; offset < end; {
		if err := ctx.Err(); err != nil {
			return err
		}
		data, err := f.Seek(offset, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) || err == nil && data >= end {
			return nil
		}
		if err != nil {
			return fmt.Errorf("find data: %w", err)
		}
		hole, err := f.Seek(data, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("find hole: %w", err)
		}
		if err := fn(data, min(hole, end)); err != nil {
			return err
		}
		offset = hole
	}
	return nil
}

// zero compares b with itself, shifted by one, once its first byte is zero.
func zero(b []byte) bool {
	return len(b) == 0 || b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1])
}
