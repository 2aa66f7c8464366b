// Package checkpoint is the data of a checkpoint: what was captured, of which
// machine, and what it rests on. It does no I/O.
package checkpoint

import (
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Kind says what a checkpoint holds.
type Kind string

// The kinds.
const (
	Disk Kind = "disk"
	Full Kind = "full"
)

// Consistency says in what state a disk checkpoint caught the file systems.
type Consistency string

// The consistencies.
const (
	// Stopped: after a clean shutdown.
	Stopped Consistency = "stopped"
	// Frozen: while the file systems refused writes.
	Frozen Consistency = "frozen"
	// Crash: as after a power cut.
	Crash Consistency = "crash"
)

// Checkpoint is the immutable record of a machine at one instant.
type Checkpoint struct {
	// ID is 16 lower-case hexadecimal digits.
	ID          string
	Name        string
	Kind        Kind
	Consistency Consistency
	// Parent is the id of the checkpoint this one is a difference of; empty
	// for the first of a machine.
	Parent    string
	MachineID string
	Message   string
	CreatedAt time.Time
	// Automatic ones were made by a restore, for its undo.
	Automatic bool
	// Spec is the machine's spec then, as its JSON.
	Spec         []byte
	ImageBuildID string
	// Layers are the ids of the disk's layers above the image, lowest first.
	Layers []string
	Routes []Route
	// DiskBytes is what its own topmost layer holds on the host.
	DiskBytes int64
	// HookFailure is what went wrong with the guest's hooks of a frozen checkpoint,
	// where that was allowed.
	HookFailure string
	// Full is nil for a disk checkpoint.
	Full *FullState
	// Verification says whether it is known that it can be restored. Nobody
	// tries that of a disk checkpoint unasked.
	Verification Verification
	// Problem is why it failed, one line.
	Problem string
	// Agent facts about who asked; empty when a person did.
	Origin Origin
}

// FullState is what a full checkpoint has besides its disk.
type FullState struct {
	// Memory are the ids of the memory layers, lowest first, the last one being
	// its own; Devices is the id of the layer with the state of CPUs and devices.
	Memory  []string
	Devices string
	// MemoryBytes is what its own memory layer takes on the host.
	MemoryBytes int64
	// Tracking says how changed pages were found (dirty.Strategy).
	Tracking string
	// Platform is machine.Platform in JSON: what a restore must find.
	Platform []byte
	// LinkMagic begins conversations with the guest's agent: it is in the memory.
	LinkMagic string
	// Unconfigured: the guest was not told who it is yet.
	Unconfigured bool
}

// Verification says whether a checkpoint was found sound: all its layers, and of
// a full one that it answered when it was restored aside.
type Verification string

// The states of verification.
const (
	Unverified Verification = "unverified"
	Verified   Verification = "verified"
	Failed     Verification = "failed"
)

// Origin is who asked for a checkpoint, where the client said so.
type Origin struct {
	SessionID        string `json:"session_id,omitempty"`
	PromptID         string `json:"prompt_id,omitempty"`
	ToolCallID       string `json:"tool_call_id,omitempty"`
	ToolName         string `json:"tool_name,omitempty"`
	TranscriptOffset int64  `json:"transcript_offset,omitempty"`
}

// Route is a published host name and the machine port it led to.
type Route struct {
	Host string `json:"host"`
	Port int    `json:"port"`
	// Listening is whether a process listened on Port then.
	Listening bool `json:"listening,omitempty"`
}

// ParseKind accepts "disk" and "full".
func ParseKind(s string) (Kind, error) {
	switch k := Kind(s); k {
	case Disk, Full:
		return k, nil
	}
	return "", errdefs.New(errdefs.Invalid, "checkpoint kind %q: use disk or full", s)
}
