//go:build linux

package qemu

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/argv"
	"github.com/holdpoint/holdpoint/internal/qmp"
)

// undoTimeout bounds what sets a failed switch right, which must not end with
// the caller's context.
const undoTimeout = 10 * time.Second

// SwitchDisk is that of machine.Run. Switching to the layer that already is the
// top changes nothing. The caller syncs the old top's file before it pauses,
// for QEMU flushes it here, inside the window. OUTCOME_UNKNOWN when QEMU did not say
// in time which layer is the top.
func (r *run) SwitchDisk(ctx context.Context, top machine.Layer) error {
	release, err := r.enter(ctx, "switch disk of")
	if err != nil {
		return err
	}
	defer release()
	running, err := r.Running(ctx)
	if err != nil {
		return err
	}
	if running {
		return errdefs.New(errdefs.WrongState, "switch disk of run %s: it is running; pause it first", r.cfg.RunID)
	}
	old, err := r.prepareTop(ctx, "switch disk of", top)
	if err != nil || old == "" {
		return err
	}
	args := map[string]any{"node": old, "overlay": disk.NodeName(top.ID)}
	// This also reopens the old top, and its file, read-only.
	if err := r.execute(ctx, "switch disk of", "blockdev-snapshot", args, nil); err != nil {
		return r.settle(ctx, top, err)
	}
	return nil
}

// prepareTop adds the node of an overlay that is going to be the top, and
// returns the node of the top it goes on; empty when it is the top already.
func (r *run) prepareTop(ctx context.Context, verb string, top machine.Layer) (old string, err error) {
	old, err = r.top(ctx)
	if err != nil || old == disk.NodeName(top.ID) {
		return "", err
	}
	size, err := r.diskSize(ctx)
	if err != nil {
		return "", err
	}
	if err := checkOverlay(top, size); err != nil {
		return "", fmt.Errorf("%s run %s: %w", verb, r.cfg.RunID, err)
	}
	return old, r.addNode(ctx, top)
}

// checkOverlay refuses what would show the guest another disk.
func checkOverlay(top machine.Layer, size int64) error {
	if top.Format != disk.Qcow2 {
		return errdefs.New(errdefs.Invalid, "layer %s is %s, not qcow2", top.ID, top.Format)
	}
	h, err := disk.ReadHeader(top.Path)
	if err != nil {
		return err
	}
	if err := h.CheckStandalone(); err != nil {
		return err
	}
	if h.VirtualSize < size {
		return errdefs.New(errdefs.Invalid, "layer %s of %d bytes is smaller than the disk of %d", top.ID, h.VirtualSize, size)
	}
	return nil
}

// top asks QEMU for the node that the root disk's device is on.
func (r *run) top(ctx context.Context) (node string, err error) {
	args := map[string]any{"path": argv.DiskPath, "property": "drive"}
	err = r.execute(ctx, "look at disk of", "qom-get", args, &node)
	return node, err
}

// diskSize is the size of the disk that the guest sees, in bytes. It stays the
// same as long as the process lives, so QEMU is asked once: its answer tells
// of all layers.
func (r *run) diskSize(ctx context.Context) (int64, error) {
	r.mu.Lock()
	size := r.size
	r.mu.Unlock()
	if size > 0 {
		return size, nil
	}
	var devices []struct {
		QDev     string
		Inserted struct {
			Image struct {
				VirtualSize int64 `json:"virtual-size"`
			}
		}
	}
	if err := r.execute(ctx, "look at disk of", "query-block", nil, &devices); err != nil {
		return 0, err
	}
	for _, d := range devices {
		if strings.HasPrefix(d.QDev, argv.DiskPath) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.size = d.Inserted.Image.VirtualSize
			return r.size, nil
		}
	}
	return 0, fmt.Errorf("look at disk of run %s: QEMU has no device %s", r.cfg.RunID, argv.DiskPath)
}

// addNode adds the overlay's node, in place of one that an interrupted switch
// may have left.
func (r *run) addNode(ctx context.Context, top machine.Layer) error {
	args, err := disk.OverlayArgs(disk.Layer(top))
	if err != nil {
		return err
	}
	const verb = "add layer to"
	var refused *qmp.Error
	if err = r.execute(ctx, verb, "blockdev-add", args, nil); errors.As(err, &refused) {
		// There is none to remove unless that is why it was refused.
		if r.delNode(ctx, top) != nil {
			return err
		}
		err = r.execute(ctx, verb, "blockdev-add", args, nil)
	}
	if err != nil && ctx.Err() != nil { // it may have been added all the same
		_ = r.aside(ctx, func(ctx context.Context) error { return r.delNode(ctx, top) })
	}
	return err
}

func (r *run) delNode(ctx context.Context, l machine.Layer) error {
	return r.execute(ctx, "remove layer from", "blockdev-del", map[string]any{"node-name": disk.NodeName(l.ID)}, nil)
}

// aside runs f on a context that does not end with the caller's.
func (r *run) aside(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return f(ctx)
}

// settle finds out whether a switch that failed with cause was made after all,
// and returns nil then; else it removes the added node.
func (r *run) settle(ctx context.Context, top machine.Layer, cause error) error {
	if r.usable("switch disk of") != nil {
		return cause
	}
	switched := false
	err := r.aside(ctx, func(ctx context.Context) error {
		now, err := r.top(ctx)
		if err != nil {
			return err
		}
		if switched = now == disk.NodeName(top.ID); switched {
			return nil
		}
		return r.delNode(ctx, top)
	})
	switch {
	case switched:
		return nil
	case err != nil:
		return errdefs.New(errdefs.OutcomeUnknown, "switch disk of run %s: %w; then: %v", r.cfg.RunID, cause, err)
	}
	return cause
}
