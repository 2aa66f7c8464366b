package capture

import (
	"context"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/store"
)

// FullSource is the run that a full checkpoint is taken of.
type FullSource interface {
	// Capture copies memory, opens the window and takes in it what the order
	// says. Until SettleCapture no other capture begins. On error the run goes
	// on as before, nothing is left in the folder, and the disk's top is the
	// old or the new one. UNSUPPORTED: the host does not allow it.
	Capture(ctx context.Context, o CaptureOrder) (CaptureReport, error)
	// SettleCapture says whether a capture was published, and with resume lets
	// a run go on that the capture kept paused. It is allowed for a capture
	// that the run knows nothing of, and more than once.
	SettleCapture(ctx context.Context, checkpointID string, published, resume bool) (Settled, error)
	// Disk are the ids of the layers the run has open, lowest first; the last
	// one is written to. The image has its own id and comes first.
	Disk(ctx context.Context) ([]string, error)
	// ChangedBytes is an upper bound of the memory that the run has changed
	// since it began; 0: it is not known.
	ChangedBytes() int64
}

// CaptureOrder is what a run is asked for.
type CaptureOrder struct {
	// CheckpointID names the capture.
	CheckpointID string
	// ParentID is the full checkpoint since which changed pages are wanted;
	// empty: all that are not zero.
	ParentID string
	// Top is the new top of the disk, an empty overlay that exists.
	Top catalog.Layer
	// Dir is an empty private folder for the files memory, pages and devices.
	Dir string
	// StayPaused: the run goes on only when SettleCapture says so.
	StayPaused bool
}

// CaptureReport is what a run has done. The files it tells of are not synced.
type CaptureReport struct {
	ChangedPages int64
	// Tracking says how changed pages were found.
	Tracking string
	// Platform is machine.Platform in JSON.
	Platform []byte
	Phases   Phases
}

// Settled says how a run went on by itself after its window.
type Settled struct {
	// Returned is from the order to the guest running with the right time; 0 if
	// it does not yet, or was kept paused.
	Returned time.Duration
	// ClockTrouble is why the guest's clock could not be corrected after the
	// window; empty if it was, or may be yet.
	ClockTrouble string
}

// Phases say where the time of a capture went.
type Phases struct {
	// Precopy is the copying while the guest ran, in Rounds.
	Precopy time.Duration
	Rounds  int
	// SyncDisk was before the window, too.
	SyncDisk time.Duration
	Window   machine.WindowTimes
	// PrecopiedBytes and WindowBytes were copied before and in the window.
	PrecopiedBytes, WindowBytes int64
}

// Memory reads the memory layers of a home (package memory).
type Memory interface {
	// View shows the memory that the layers, lowest first, stand for, until
	// release is called. STORAGE names a layer that is damaged.
	View(ctx context.Context, layers []catalog.Layer) (view *store.View, release func(), err error)
}

// The files of a staging folder, which the run leaves there.
const (
	stagedMemory  = "memory"
	stagedPages   = "pages"
	stagedDevices = "devices"
)
