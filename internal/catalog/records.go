package catalog

import (
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
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

// OperationState says whether and how an operation ended.
type OperationState string

// The states of an operation.
const (
	OperationRunning  OperationState = "running"
	OperationDone     OperationState = "done"
	OperationFailed   OperationState = "failed"
	OperationCanceled OperationState = "canceled"
)

// Operation is one long-running request. Its life: Admit records it before its
// first effect; UpdatePhase records how far it came; Finish records the
// outcome and gives back all it held. It is pruned long after.
type Operation struct {
	ID        string
	RequestID string
	Verb      string
	// Options is the request as JSON; its layout and key order do not matter.
	Options     []byte
	MachineID   string
	MachineName string
	Phase       string
	State       OperationState
	// Detail is JSON of the verb's own: what its undo needs.
	Detail       []byte
	ErrorKind    errdefs.Kind
	ErrorMessage string
	// Result is JSON, of one that is done.
	Result    []byte
	CreatedAt time.Time
	EndedAt   time.Time
}

// ResourceKind is what a lease can be on.
type ResourceKind string

// The kinds of resources.
const (
	MachineResource    ResourceKind = "machine"
	CheckpointResource ResourceKind = "checkpoint"
	LayerResource      ResourceKind = "layer"
	ImageResource      ResourceKind = "image"
)

// Claim is what an operation wants to hold.
type Claim struct {
	Kind ResourceKind
	ID   string
	// Exclusive claims exclude all others, shared ones only exclusive ones.
	Exclusive bool
}

// Lease is a claim that an operation holds.
type Lease struct {
	Claim
	OperationID string
	ExpiresAt   time.Time
}
