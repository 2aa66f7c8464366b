package machine

import (
	"context"
	"io"
	"net"
	"os"
	"time"

	"github.com/holdpoint/holdpoint/internal/dirty"
)

// ConsoleSocket is the name of the socket of a run's console.
const ConsoleSocket = "console.sock"

// RunConfig is all that a hypervisor needs to begin one run.
type RunConfig struct {
	// RunID is 16 lower-case hexadecimal digits, new for each run.
	RunID string
	// Dir is the run's private folder (0700), for the memory file, the
	// console log (console.log) and what the process prints.
	Dir string
	// SocketDir is a private folder (0700) of this run alone whose path is
	// short enough for sockets; it may be Dir. Who connects to ConsoleSocket there
	// is at the guest's console, one at a time; the log is written all the same.
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
	// NIC gives the guest a network device, whose other end is what the run's
	// DialNetwork (Networked) connects to; nobody needs to.
	NIC bool `json:",omitempty"`
	// Incoming, not nil, is the instant the run continues from; Kernel,
	// Initramfs and Cmdline are not used then.
	Incoming *Incoming `json:",omitempty"`
}

// Incoming is what a full checkpoint keeps of a run besides its disk.
type Incoming struct {
	// MemoryFile has the guest's memory, MemoryBytes long. It is mapped
	// privately by any number of runs, never written, and stays in its place
	// while one of them lives.
	MemoryFile string `json:"memory_file"`
	// DeviceState is what Window wrote.
	DeviceState string `json:"device_state"`
	// Checkpoint is the one MemoryFile holds the memory of: the pages a run
	// has changed are counted since it.
	Checkpoint string `json:"checkpoint"`
	// Unconfigured guests were kept before they were told who they are: they
	// are configured as after a boot. Others are told to continue.
	Unconfigured bool `json:"unconfigured,omitempty"`
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
	// Launch begins a run: of a boot, or loaded with cfg.Incoming, which fails
	// with STORAGE when that cannot be loaded. On error nothing is left running
	// and no file is left in cfg.Dir. ctx bounds the launch, not the run.
	Launch(ctx context.Context, cfg RunConfig) (Run, error)
	// Adopt takes over a run whose launcher is gone. NOT_FOUND means that
	// the process has ended.
	Adopt(ctx context.Context, cfg RunConfig, p Process) (Run, error)
	// Platform is what runs of the config are made of, for comparison with
	// that of a full checkpoint.
	Platform(ctx context.Context, cfg RunConfig) (Platform, error)
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
	// AwaitStall returns nil once the process has stopped the vCPUs by itself,
	// because the host had no room for a write to the machine's disk, and at
	// once while they stand still for that. Resume tries the write again; when
	// it fails, they are stopped again.
	AwaitStall(ctx context.Context) error
	// SwitchDisk makes top, an empty overlay that exists, the writable top of
	// the disk; the old top is opened read-only from then on. The run must be
	// paused. On error the old top is still the writable one.
	SwitchDisk(ctx context.Context, top Layer) error
	// SwitchAtRest is SwitchDisk of a run that may be running. Once top is
	// prepared it calls atRest, which sees to it that the guest writes nothing
	// while it calls change, once. switched says whether top is the writable top
	// now, whatever the error; with OUTCOME_UNKNOWN it is not known.
	SwitchAtRest(ctx context.Context, top Layer, atRest AtRest) (switched bool, err error)
	// ReplaceLayers puts merged, which is opened read-only, in the place of
	// the layers chain[from:to] of the disk's whole chain, lowest first: sealed
	// ones, neither the lowest nor the top, which show the same over what is
	// below them. The run may be running. On error the disk rests on the one or
	// the other, and it may be repeated for the same layers or more.
	ReplaceLayers(ctx context.Context, chain []Layer, from, to int, merged Layer) error
	// Memory looks into the guest's memory. UNSUPPORTED, with the reason, where
	// the host does not allow it; nothing was changed then. One at a time.
	Memory(ctx context.Context) (Memory, error)
	// Window stops the vCPUs, takes the state of CPUs and devices, switches
	// the disk as SwitchDisk does, and lets the vCPUs go again, all in as little
	// time as there is. On error, and if w.Pages fails, the vCPUs run as
	// before, and the disk's top is the old or the new one; booting from either is right.
	// OUTCOME_UNKNOWN: the process did not say by the deadline whether they do.
	Window(ctx context.Context, w Window) (WindowTimes, error)
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

// Networked is a Run that may have a network device.
type Networked interface {
	// DialNetwork connects to the other end of the guest's network device; one
	// connection at a time, and the next one whenever that has ended. It carries
	// ethernet frames, each behind its length in four bytes, big-endian.
	DialNetwork(ctx context.Context) (net.Conn, error)
}

// Ended reports whether the run's exit is proven.
func Ended(r Run) bool {
	select {
	case <-r.Exited():
		return true
	default:
		return false
	}
}

// AtRest calls change while a guest writes nothing to its disk. Its error is that
// of change, or says why what was changed was not at rest.
type AtRest func(change func(context.Context) error) error

// Memory is the guest's memory as seen from outside, and which pages of it
// were written. Its life is that of dirty.Tracker, whose methods these are.
type Memory interface {
	// Strategy says how written pages are found; unless it is Live, Arm and
	// Scan are only called while the vCPUs stand still.
	Strategy() dirty.Strategy
	Arm() (*dirty.Set, error)
	Scan() (*dirty.Set, error)
	io.ReaderAt
	Close() error
}

// Window is what is done while the vCPUs stand still.
type Window struct {
	// State takes the state of CPUs and devices. It is open for writing only,
	// empty, and the caller's to close.
	State *os.File
	// Top is the new writable top, as of SwitchDisk; nil leaves the disk as it is.
	Top *Layer
	// Pages is called once the vCPUs stand still and the disk is drained, at
	// the same time as the rest; the vCPUs go on only after it has returned.
	Pages func(ctx context.Context) error
	// StayPaused leaves the vCPUs stopped at the end of a window without error.
	StayPaused bool
	// WasPaused: the vCPUs stand still already, and stay so.
	WasPaused bool
}

// WindowTimes says where a window's time went. Stop to Resume follow each
// other but for Pages, which runs beside Devices and Switch.
type WindowTimes struct {
	Stop, Devices, Switch, Pages, Resume time.Duration
	// Downtime is from the request to stop to the end of Resume.
	Downtime time.Duration
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

// Isolation says by what a run's process is kept from the rest of the host, one
// line each.
type Isolation struct {
	By []string `json:"by"`
	// Missing is what this host has not got, with the reason.
	Missing []string `json:"missing,omitempty"`
}

// Isolated is a Run that is kept from the rest of the host.
type Isolated interface {
	Isolation() Isolation
}
