package journal

import (
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// OperationState says whether and how an operation ended.
type OperationState string

// The states of an operation.
const (
	Running  OperationState = "running"
	Done     OperationState = "done"
	Failed   OperationState = "failed"
	Canceled OperationState = "canceled"
)

// Operation is one long-running request. Its life: Admit records it before its
// first effect; UpdateOperation records how far it came; Finish records the
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
	Machine    ResourceKind = "machine"
	Checkpoint ResourceKind = "checkpoint"
	Layer      ResourceKind = "layer"
	Image      ResourceKind = "image"
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
