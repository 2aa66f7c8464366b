package catalog

import (
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog/effects"
	"github.com/holdpoint/holdpoint/internal/catalog/journal"
	"github.com/holdpoint/holdpoint/internal/catalog/ready"
	"github.com/holdpoint/holdpoint/internal/catalog/rows"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// Image is what machines start from.
type Image struct {
	BuildID string
	// Name is empty when it was given to a newer build.
	Name          string
	Architecture  string
	KernelVersion string
	// DiskBytes is the root disk as a guest sees it, StoredBytes the image on the host.
	DiskBytes   int64
	StoredBytes int64
	Packages    []string
	Description string
	CreatedAt   time.Time
	// UsedBy counts machines and checkpoints that need it. Filled by reads.
	UsedBy int
}

// Machine is a guest with an identity.
type Machine struct {
	ID           string
	Name         string
	ImageBuildID string
	Spec         machine.Spec
	State        machine.State
	// Generation counts restores.
	Generation uint64
	// RunID is the run begun last; empty before the first.
	RunID string
	// Exit says why the last run ended; empty while it has not.
	Exit string
	// LinkMagic is 32 hexadecimal digits, random per machine.
	LinkMagic string
	// Head is the id of the checkpoint the disk continues from; empty for the image.
	Head string
	// MemoryHead is the full checkpoint, or the image's booted one, since which
	// the run's changed pages are counted: MemoryChain is its memory. It may be
	// forgotten meanwhile; empty for a boot without a full checkpoint since.
	MemoryHead string
	// MemoryFile is the id of the top memory layer whose memory file the run
	// maps; empty for a booted run and without a run.
	MemoryFile string
	// ForkedFrom is the checkpoint it began from, which may be gone; empty for none.
	ForkedFrom string
	// RemoveOnStop: the machine goes when its run ends.
	RemoveOnStop bool
	CreatedAt    time.Time
	// HeldBy is the operation with an exclusive lease on it, if any, and
	// ChainLength counts the layers above the image. Filled by reads.
	HeldBy      string
	ChainLength int
}

// The records of layers.
type (
	Layer      = rows.Layer
	LayerState = rows.LayerState
	Measured   = rows.Measured
)

// The states of a layer.
const (
	LayerCreated = rows.LayerCreated
	LayerLive    = rows.LayerLive
	LayerSealed  = rows.LayerSealed
)

// The formats of a layer.
const (
	Qcow2Format   = rows.Qcow2
	RawFormat     = rows.Raw
	MemoryFormat  = rows.Memory
	DevicesFormat = rows.Devices
)

// Standby is a run that is loaded and has never run.
type Standby = ready.Standby

// Effect is something outside a machine's disk that no restore undoes.
type Effect = effects.Effect

// EffectKind says what happened outside a machine's disk.
type EffectKind = effects.Kind

// The kinds of effects.
const (
	Published = effects.Published
	Withdrawn = effects.Withdrawn
	CopiedOut = effects.CopiedOut
)

// Route is a published host name and the machine port it leads to.
type Route struct {
	Host      string
	MachineID string
	Port      int
	CreatedAt time.Time
	// Machine is the machine's name. Filled by reads.
	Machine string
}

// The records of the journal.
type (
	Operation      = journal.Operation
	OperationState = journal.OperationState
	Progress       = journal.Progress
	Outcome        = journal.Outcome
	ResourceKind   = journal.ResourceKind
	Claim          = journal.Claim
	Lease          = journal.Lease
)

// The states of an operation.
const (
	OperationRunning  = journal.Running
	OperationDone     = journal.Done
	OperationFailed   = journal.Failed
	OperationCanceled = journal.Canceled
)

// The kinds of resources that a lease can be on.
const (
	MachineResource    = journal.Machine
	CheckpointResource = journal.Checkpoint
	LayerResource      = journal.Layer
	ImageResource      = journal.Image
)
