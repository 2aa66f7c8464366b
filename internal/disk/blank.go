package disk

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// maxBlanks is how many sizes of empty overlays are remembered; each takes some
// 20 KiB.
const maxBlanks = 64

// blockSize is the unit in which a blank is read, in bytes.
const blockSize = 4096

// maxBlank bounds the file of an empty overlay, in bytes; one of 2 TiB has
// 5 MiB.
const maxBlank = 64 << 20

// blank is the content of an empty overlay: qemu-img makes the same bytes for
// the same size and options each time, and most of them are zero.
type blank struct {
	length int64
	blocks map[int64][]byte
}

// readBlank reads an overlay that was just made.
func readBlank(path string) (blank, error) {
	info, err := os.Stat(path)
	if err == nil && info.Size() > maxBlank {
		err = fmt.Errorf("it has %d bytes and holds nothing", info.Size())
	}
	var data []byte
	if err == nil {
		data, err = os.ReadFile(path)
	}
	if err != nil {
		return blank{}, errdefs.New(errdefs.Storage, "read empty overlay %q: %w", path, err)
	}
	b := blank{length: int64(len(data)), blocks: map[int64][]byte{}}
	for at := 0; at < len(data); at += blockSize {
		block := data[at:min(at+blockSize, len(data))]
		if len(bytes.Trim(block, "\x00")) > 0 {
			b.blocks[int64(at)] = bytes.Clone(block)
		}
	}
	return b, nil
}

// write gives an empty file the content, with holes where that is zero.
func (b blank) write(f *os.File) error {
	err := f.Truncate(b.length)
	for at, block := range b.blocks {
		if err == nil {
			_, err = f.WriteAt(block, at)
		}
	}
	if errors.Is(err, syscall.ENOSPC) {
		return errdefs.New(errdefs.NoSpace, "write empty overlay: %w; free some space", err)
	}
	if err != nil {
		return errdefs.New(errdefs.Storage, "write empty overlay: %w", err)
	}
	return nil
}
