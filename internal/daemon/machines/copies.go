//go:build linux

package machines

import (
	"context"
	"sync"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
)

// checkRoom refuses a fork for whose copies of a raw disk there is no room.
func (s *Service) checkRoom(ctx context.Context, k checkpoint.Checkpoint, count int) error {
	layers, err := s.Catalog.GetLayers(ctx, k.Layers...)
	if err != nil || len(layers) != 1 || layers[0].Format != catalog.RawFormat {
		return err
	}
	return s.Capturer.CheckCopies(s.Capturer.Path(layers[0]), count)
}

// copies adds up how far several copies of one raw disk are.
type copies struct {
	count int
	show  func(done, total int64)

	mu   sync.Mutex
	done int64
}

// next is told how far one more copy is.
func (c *copies) next() func(done, total int64) {
	var last int64
	return func(done, total int64) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.done, last = c.done+done-last, done
		c.show(c.done, total*int64(c.count))
	}
}
