//go:build linux

// Package blocks changes what the root disk of a running QEMU is made of: the
// writable top of its chain, and layers below it. It knows QEMU's block nodes
// and nothing of the run that they belong to.
package blocks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/argv"
	"github.com/holdpoint/holdpoint/internal/qemu/reach"
	"github.com/holdpoint/holdpoint/internal/qmp"
)

// undoTimeout bounds what sets a failed switch right, which must not end with
// the caller's context.
const undoTimeout = 10 * time.Second

// Disk is the root disk of one QEMU process. Its methods but for Size may not be
// called at the same time.
type Disk struct {
	// RunID names the run in errors.
	RunID string
	// Execute runs one QMP command; verb says for people what it is for.
	Execute func(ctx context.Context, verb, command string, args, result any) error
	// Reach gives the process the files.
	Reach *reach.Reach

	mu sync.Mutex
	// size is that of the disk, in bytes; 0 until QEMU was asked.
	size int64
}

// Switch makes top the writable top; the machine must be paused. It changes
// nothing when top is that already. On error the old top is still the writable
// one, but for OUTCOME_UNKNOWN, when QEMU did not say in time which one is.
func (d *Disk) Switch(ctx context.Context, top machine.Layer) error {
	switched, err := d.SwitchAtRest(ctx, top, func(change func(context.Context) error) error { return change(ctx) })
	if switched {
		return nil
	}
	return err
}

var errNotTried = errors.New("the disk was not at rest")

// SwitchAtRest makes top the writable top when atRest calls what it is given,
// and says whether it is, as machine.Run does.
func (d *Disk) SwitchAtRest(ctx context.Context, top machine.Layer, atRest machine.AtRest) (switched bool, err error) {
	const verb = "switch disk of"
	old, err := d.Prepare(ctx, verb, top)
	if err != nil {
		return false, err
	}
	failed := errNotTried
	err = atRest(func(ctx context.Context) error {
		failed = nil
		if old != "" { // else it is the top already
			// This also reopens the old top, and its file, read-only.
			args := map[string]any{"node": old, "overlay": disk.NodeName(top.ID)}
			failed = d.Execute(ctx, verb, "blockdev-snapshot", args, nil)
		}
		return failed
	})
	if failed != nil {
		if settled := d.Settle(ctx, top, cmp.Or(err, failed)); settled != nil {
			return false, settled
		}
	}
	d.Reach.Keep(top.ID)
	return true, err
}

// Prepare adds the node of an overlay that is going to be the top, and
// returns the node of the top it goes on; empty when it is the top already.
func (d *Disk) Prepare(ctx context.Context, verb string, top machine.Layer) (old string, err error) {
	old, err = d.Top(ctx)
	if err != nil || old == disk.NodeName(top.ID) {
		return "", err
	}
	size, err := d.Size(ctx)
	if err != nil {
		return "", err
	}
	virtual, err := checkLayer(top)
	if err == nil && virtual < size {
		err = errdefs.New(errdefs.Invalid, "layer %s of %d bytes is smaller than the disk of %d", top.ID, virtual, size)
	}
	if err != nil {
		return "", fmt.Errorf("%s run %s: %w", verb, d.RunID, err)
	}
	named, err := d.Reach.Writable(top)
	if err != nil {
		return "", fmt.Errorf("%s run %s: %w", verb, d.RunID, err)
	}
	args, err := disk.OverlayArgs(disk.Layer(named))
	if err != nil {
		return "", err
	}
	return old, d.add(ctx, top, args)
}

// checkLayer refuses a file that could show the guest what is in no layer, and
// gives the size of the disk that it shows, in bytes.
func checkLayer(l machine.Layer) (virtual int64, err error) {
	if l.Format != disk.Qcow2 {
		return 0, errdefs.New(errdefs.Invalid, "layer %s is %s, not qcow2", l.ID, l.Format)
	}
	h, err := disk.ReadHeader(l.Path)
	if err != nil {
		return 0, err
	}
	return h.VirtualSize, h.CheckStandalone()
}

// Top asks QEMU for the node that the root disk's device is on.
func (d *Disk) Top(ctx context.Context) (node string, err error) {
	args := map[string]any{"path": argv.DiskPath, "property": "drive"}
	err = d.Execute(ctx, "look at disk of", "qom-get", args, &node)
	return node, err
}

// Size is the size of the disk that the guest sees, in bytes. It stays the
// same as long as the process lives, so QEMU is asked once: its answer tells
// of all layers.
func (d *Disk) Size(ctx context.Context) (int64, error) {
	d.mu.Lock()
	size := d.size
	d.mu.Unlock()
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
	if err := d.Execute(ctx, "look at disk of", "query-block", nil, &devices); err != nil {
		return 0, err
	}
	for _, device := range devices {
		if strings.HasPrefix(device.QDev, argv.DiskPath) {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.size = device.Inserted.Image.VirtualSize
			return d.size, nil
		}
	}
	return 0, fmt.Errorf("look at disk of run %s: QEMU has no device %s", d.RunID, argv.DiskPath)
}

// add adds the layer's node, in place of one that an interrupted change may
// have left.
func (d *Disk) add(ctx context.Context, l machine.Layer, args any) error {
	const verb = "add layer to"
	var refused *qmp.Error
	err := d.Execute(ctx, verb, "blockdev-add", args, nil)
	if errors.As(err, &refused) {
		// There is none to remove unless that is why it was refused.
		if d.remove(ctx, l) != nil {
			return err
		}
		err = d.Execute(ctx, verb, "blockdev-add", args, nil)
	}
	if err != nil && ctx.Err() != nil { // it may have been added all the same
		_ = Aside(ctx, func(ctx context.Context) error { return d.remove(ctx, l) })
	}
	return err
}

// remove removes the layer's node.
func (d *Disk) remove(ctx context.Context, l machine.Layer) error {
	return d.Execute(ctx, "remove layer from", "blockdev-del", map[string]any{"node-name": disk.NodeName(l.ID)}, nil)
}

// Aside runs f on a context that does not end with the caller's.
func Aside(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return f(ctx)
}

// Settle finds out whether a switch that failed with cause was made after all,
// and returns nil then; else it removes the added node.
func (d *Disk) Settle(ctx context.Context, top machine.Layer, cause error) error {
	switched := false
	err := Aside(ctx, func(ctx context.Context) error {
		now, err := d.Top(ctx)
		if err != nil {
			return err
		}
		if switched = now == disk.NodeName(top.ID); switched {
			return nil
		}
		if err = d.remove(ctx, top); err == nil {
			d.Reach.Forget(top.ID)
		}
		return err
	})
	switch {
	case switched:
		return nil
	case err != nil:
		return errdefs.New(errdefs.OutcomeUnknown, "switch disk of run %s: %w; then: %v", d.RunID, cause, err)
	}
	return cause
}
