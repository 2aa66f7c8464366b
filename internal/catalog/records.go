package catalog

import (
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog/journal"
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
	Head      string
	CreatedAt time.Time
	// HeldBy is the operation with an exclusive lease on it, if any, and
	// ChainLength counts the layers above the image. Filled by reads.
	HeldBy      string
	ChainLength int
}

// LayerState says how far a layer's life has come.
type LayerState string

// The states of a layer.
const (
	LayerCreated LayerState = "created"
	LayerLive    LayerState = "live"
	LayerSealed  LayerState = "sealed"
)

// Layer is one file of a disk above the image.
type Layer struct {
	ID string
	// MachineID is the machine whose run writes or wrote it.
	MachineID string
	// Path is relative to the home, slash-separated, and final.
	Path string
	// Format is "raw" or "qcow2".
	Format       string
	VirtualBytes int64
	// StoredBytes is what it takes on the host, as far as measured.
	StoredBytes int64
	State       LayerState
	// Digest is "sha256:…" of a sealed one, empty until computed.
	Digest    string
	CreatedAt time.Time
}

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
