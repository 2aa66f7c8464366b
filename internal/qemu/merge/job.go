//go:build linux

package merge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/qmp"
)

// job commits everything from the layer upTo down to base, and lets QEMU quit.
// QEMU reports the end of a block job by an event, whose error is empty on
// success. bytesPerSecond bounds its speed unless it is 0.
func job(ctx context.Context, conn *net.UnixConn, top, base, upTo disk.Layer, bytesPerSecond int64) error {
	done := qmp.NewSubscription("BLOCK_JOB_COMPLETED", "BLOCK_JOB_ERROR", "BLOCK_JOB_CANCELLED")
	client, err := qmp.Connect(ctx, conn, done)
	if err != nil {
		return err
	}
	defer client.Close()
	args := map[string]any{
		"job-id": "merge", "device": disk.NodeName(top.ID),
		"base-node": disk.NodeName(base.ID), "top-node": disk.NodeName(upTo.ID), "speed": bytesPerSecond,
	}
	if err := client.Execute(ctx, "block-commit", args, nil); err != nil {
		return err
	}
	for {
		event, err := done.Next(ctx)
		if err != nil {
			return err
		}
		var said struct {
			Error     string
			Operation string
		}
		if err := json.Unmarshal(event.Data, &said); err != nil {
			return fmt.Errorf("read event %s: %w", event.Name, err)
		}
		switch {
		case event.Name == "BLOCK_JOB_ERROR":
			continue // what became of it is in the last event
		case said.Error != "":
			return errors.New(said.Error)
		case event.Name != "BLOCK_JOB_COMPLETED":
			return errors.New("the block job was canceled")
		}
		return client.Execute(ctx, "quit", nil, nil)
	}
}
