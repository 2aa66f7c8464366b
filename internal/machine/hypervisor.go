package machine

import (
	"context"
	"net"
)

// RunConfig is all that a hypervisor needs to begin one run.
type RunConfig struct {
	// RunID is 16 lower-case hexadecimal digits, new for each run.
	RunID string
	// Dir is the run's private folder (0700), for the memory file, the
	// console log (console.log) and what the process prints.
	Dir string
	// SocketDir is a private folder (0700) of this run alone whose path is
	// short enough for sockets; it may be Dir.
	SocketDir   string
	MachineID   string
	MachineName string
	MemoryBytes int64
	CPUs        int
	// Kernel and Initramfs are files of the image, opened read-only.
	Kernel    string
	Initramfs string
	// Cmdline is the kernel command line without the console. It carries
	// holdpoint.magic=<32 hex digits>, with which the host begins each
	// conversation on the agent link.
	Cmdline string
	// Disk is the root disk's chain, lowest first. The last one is the
	// writable top; the others are opened read-only.
	Disk []Layer
	// Accelerator is "kvm" or "tcg".
	Accelerator string
}

// Layer is one file of a disk chain. No file name inside it is ever followed.
type Layer struct {
	ID string
	// Path is absolute and final: a layer is never renamed.
	Path string
	// Format is "raw" or "qcow2".
	Format string
}

// Process names one process beyond doubt: a pid alone may have been reused.
type Process struct {
	PID int `json:"pid"`
	// StartTime is field 22 of /proc/PID/stat, in clock ticks since host boot.
	StartTime uint64 `json:"start_time"`
	// BootID is the host's /proc/sys/kernel/random/boot_id.
	BootID string `json:"boot_id"`
}

// Hypervisor begins runs. The whole life of a run: Launch starts the process
// with the guest's CPUs stopped and nothing executed, Resume lets it go,
// Pause and Resume alternate, and it ends by the guest's own shutdown or
// reset, by Kill, or by crashing; Exited is closed then and Exit says which.
// Whoever launched the process may die: Adopt makes a Run of the same process
// in another one.
type Hypervisor interface {
	// Launch begins a run. On error nothing is left running and no file is
	// left in cfg.Dir. ctx bounds the launch, not the run.
	Launch(ctx context.Context, cfg RunConfig) (Run, error)
	// Adopt takes over a run whose launcher is gone. NOT_FOUND means that
	// the process has ended.
	Adopt(ctx context.Context, cfg RunConfig, p Process) (Run, error)
}

// Coroner is a Hypervisor that can tell how a run ended that nobody watched.
type Coroner interface {
	// ExitOf says how the run ended, by what its process left; the process is
	// known to be gone. Without evidence it is Crashed.
	ExitOf(cfg RunConfig) Exit
}

// Run is one process of a machine. Its methods may be called at the same time.
// All errors of a run that has ended are of kind WRONG_STATE.
type Run interface {
	Process() Process
	// Pause stops the vCPUs and drains the disk. Pausing a paused run is
	// allowed and changes nothing.
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
	// Running reports whether the vCPUs run.
	Running(ctx context.Context) (bool, error)
	// SwitchDisk makes top, an empty overlay that exists, the writable top of
	// the disk; the old top is opened read-only from then on. The run must be
	// paused. On error the old top is still the writable one.
	SwitchDisk(ctx context.Context, top Layer) error
	// DialLink connects to the agent link; one connection at a time. The
	// bytes are raw: package link makes a conversation of them.
	DialLink(ctx context.Context) (net.Conn, error)
	// Kill ends the process as a power cut would and returns when its exit is proven.
	Kill(ctx context.Context) error
	// Exited is closed when the process's exit is proven.
	Exited() <-chan struct{}
	// Exit is meaningful after Exited was closed.
	Exit() Exit
	// Close lets go of the run without ending it, so that another process
	// can adopt it. Not needed after exit.
	Close() error
}

// ExitReason says how a run ended.
type ExitReason string

// The reasons. A guest that reboots ends its run with GuestReset: the process
// exits and a new run is begun.
const (
	GuestShutdown ExitReason = "guest-shutdown"
	GuestReset    ExitReason = "guest-reset"
	GuestPanic    ExitReason = "guest-panic"
	Killed        ExitReason = "killed"
	Crashed       ExitReason = "crashed"
)

// Exit is how a run ended.
type Exit struct {
	Reason ExitReason `json:"reason"`
	// Message is what the process printed last, one line, for people.
	Message string `json:"message,omitempty"`
}
