package memory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// checkPiece is how much of a file is compared at once, in bytes.
const checkPiece = 1 << 20

// Check compares the memory file of a full checkpoint, if there is one, with
// the layers it was made of, and removes one that differs: the next Open makes
// it anew. A run that maps it keeps what it has. STORAGE names a damaged layer.
func (c *Cache) Check(ctx context.Context, k checkpoint.Checkpoint) (removed bool, err error) {
	if k.Full == nil || len(k.Full.Memory) == 0 {
		return false, nil
	}
	id := k.Full.Memory[len(k.Full.Memory)-1]
	e := c.lease(id)
	defer c.release(e)
	done, err := e.begin(ctx)
	if err != nil {
		return false, err
	}
	defer done()
	path := c.path(id)
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, errdefs.As(errdefs.Storage, err)
	}
	defer file.Close()
	same, err := c.same(ctx, file, k.Full.Memory)
	if err != nil {
		return false, fmt.Errorf("check memory of checkpoint %s: %w", k.ID, err)
	}
	if same {
		return false, nil
	}
	c.cfg.Log.Warn("a memory file is not what its layers say; it is removed and will be made anew", "file", path)
	return true, c.cfg.Files.RemoveUnsynced(path)
}

// same reports whether the file holds what the layers stand for.
func (c *Cache) same(ctx context.Context, file *os.File, ids []string) (bool, error) {
	records, err := c.cfg.Catalog.GetLayers(ctx, ids...)
	if err != nil {
		return false, err
	}
	view, done, err := c.View(ctx, records)
	if err != nil {
		return false, err
	}
	defer done()
	size := view.MemoryBytes()
	st, err := file.Stat()
	if err != nil {
		return false, errdefs.As(errdefs.Storage, err)
	}
	if !st.Mode().IsRegular() || st.Size() != size {
		return false, nil
	}
	want, got := make([]byte, checkPiece), make([]byte, checkPiece)
	for at := int64(0); at < size; at += checkPiece {
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		n := min(checkPiece, size-at)
		if _, err := view.ReadAt(want[:n], at); err != nil && !errors.Is(err, io.EOF) {
			return false, err
		}
		if _, err := file.ReadAt(got[:n], at); err != nil && !errors.Is(err, io.EOF) {
			return false, nil // it cannot be read
		}
		if !bytes.Equal(want[:n], got[:n]) {
			return false, nil
		}
	}
	return true, nil
}
