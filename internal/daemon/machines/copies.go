//go:build linux

package machines

import (
	"context"

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
