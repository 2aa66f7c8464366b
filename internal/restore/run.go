package restore

import (
	"context"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// Source is the run that a restore displaces.
type Source interface {
	// Stop asks the guest to shut down within the restore's patience; clean
	// is whether it did and the run ended by itself. After an error it goes on.
	Stop(ctx context.Context) (clean bool, err error)
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
	// SwitchDisk gives the paused run a new top to write to.
	SwitchDisk(ctx context.Context, top catalog.Layer) error
	// Kill ends the run as a power cut would and returns when its exit is
	// proven. Killing an ended run changes nothing.
	Kill(ctx context.Context) error
	// Boot begins a run of the machine's recorded chain, after the source ended.
	Boot(ctx context.Context) error
}

// Host says what runs are made of here.
type Host interface {
	// Platform is what a run of the machine would be made of.
	Platform(ctx context.Context, m catalog.Machine) (machine.Platform, error)
}

// Destination begins and ends the runs that machines get.
type Destination interface {
	// Begin starts a run, beside the machine's current one if it has one, and
	// returns when its guest has answered. On error nothing of it is left. A
	// standby is taken over by its run id and let go.
	Begin(ctx context.Context, m catalog.Machine, l Launch) (Begun, error)
	// Replace makes a run that was begun, and is recorded, the machine's
	// current one, in m's generation, and the machine running.
	Replace(ctx context.Context, m catalog.Machine, runID string) error
	// End ends a run that did not come to that, begun by this process or an
	// earlier one, and removes its folder.
	End(ctx context.Context, machineID, runID string) error
}

// Launch is the run that is to begin.
type Launch struct {
	RunID string
	// Chain is the disk above the image, lowest first; the last one is written to.
	Chain []catalog.Layer
	// Incoming is nil for a boot.
	Incoming *machine.Incoming
	// Standby: the run is there, loaded and waiting. Incoming says with what.
	Standby bool
	// AsIs does without proof that the guest has its identity, entropy and time.
	AsIs bool
}

// Begun says how the begin of a run went.
type Begun struct {
	// Running and Answer are from the call of Begin until the vCPUs ran and
	// until the guest had answered.
	Running, Answer time.Duration
	// ClosedSockets to the outside are those the guest had to give up.
	ClosedSockets int
	// Note is for people; empty for nothing.
	Note string
}

// From what a run was made.
const (
	FromStandby    = "standby"
	FromMemoryFile = "memory-file"
	FromLayers     = "layers"
	FromDisk       = "disk"
)
