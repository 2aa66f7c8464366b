// Package view turns what the daemon says into what the command line shows:
// JSON objects with fixed field names, tables, and the tree of checkpoints. It
// asks nothing and decides nothing.
package view

import (
	"encoding/json"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// SchemaVersion counts incompatible changes of the JSON output; new fields may
// come without one.
const SchemaVersion = 1

// Header begins every JSON object.
type Header struct {
	SchemaVersion int `json:"schema_version"`
}

// NewHeader is the header of this version.
func NewHeader() Header { return Header{SchemaVersion: SchemaVersion} }

// Machine is a machine.
type Machine struct {
	Name         string  `json:"name"`
	ID           string  `json:"id"`
	State        string  `json:"state"`
	Image        string  `json:"image"`
	ImageBuildID string  `json:"image_build_id"`
	Spec         Spec    `json:"spec"`
	Generation   uint64  `json:"generation"`
	RunID        string  `json:"run_id"`
	CreatedAt    string  `json:"created_at"`
	Routes       []Route `json:"routes"`
	Operation    string  `json:"operation"`
	Accelerator  string  `json:"accelerator"`
	QEMUVersion  string  `json:"qemu_version"`
	QEMUPID      int64   `json:"qemu_pid"`
	MonitorPID   int64   `json:"monitor_pid"`
	Exit         string  `json:"exit"`
	Head         string  `json:"head" doc:"id of the checkpoint it continues from, empty for none"`
	ChainLength  uint32  `json:"chain_length"`
	// FullCheckpoints is how changed pages of memory are found.
	FullCheckpoints string   `json:"full_checkpoints" doc:"how changed memory is found, or why full checkpoints cannot be taken; empty while it does not run"`
	ForkedFrom      string   `json:"forked_from" doc:"id of the checkpoint it was forked from, empty for none"`
	RemoveOnStop    bool     `json:"remove_on_stop"`
	Trouble         string   `json:"trouble" doc:"why its guest is not ready, stands still by nobody's order, or could not be started again; empty for none"`
	DiskPath        string   `json:"disk_path" doc:"the file that is its raw disk, another one after a restore; empty for a qcow2 disk"`
	IsolatedBy      []string `json:"isolated_by" doc:"what keeps its QEMU from the rest of the host; empty while it does not run"`
	NotIsolated     []string `json:"not_isolated" doc:"what of that the host has not got, with the reason"`
}

// Spec is what a machine is made of.
type Spec struct {
	MemoryBytes int64    `json:"memory_bytes"`
	CPUs        uint32   `json:"cpus"`
	DiskBytes   int64    `json:"disk_bytes"`
	DiskFormat  string   `json:"disk_format" doc:"qcow2 or raw"`
	Init        string   `json:"init" doc:"who process 1 of its guest is: agent, or system for the init of the disk"`
	OnBoot      string   `json:"on_boot"`
	Tmpfs       []string `json:"tmpfs"`
	Network     string   `json:"network" doc:"none, internet or open"`
	Allow       []string `json:"network_allow" doc:"all that can be reached within the network, empty for no such list"`
	AllowHost   []uint32 `json:"network_allow_host" doc:"ports of the host's own that can be reached"`
	// SuspendAfterMS is 0 for never.
	SuspendAfterMS int64  `json:"suspend_after_ms" doc:"an idle machine is suspended after this time, 0 for never"`
	CPULimitMillis uint32 `json:"cpu_limit_millis" doc:"CPU time its process may use, in thousandths of a CPU, 0 for no limit"`
	MemoryLimit    int64  `json:"memory_limit_bytes" doc:"the host's memory its process may use, 0 for no limit"`
	Restart        string `json:"restart" doc:"always: it is started again when it has stopped by itself; no"`
}

// Image is what machines start from.
type Image struct {
	Name          string   `json:"name"`
	BuildID       string   `json:"build_id"`
	Architecture  string   `json:"architecture"`
	DiskBytes     int64    `json:"disk_bytes"`
	StoredBytes   int64    `json:"stored_bytes"`
	CreatedAt     string   `json:"created_at"`
	KernelVersion string   `json:"kernel_version"`
	Packages      []string `json:"packages"`
	UsedBy        uint32   `json:"used_by"`
	Description   string   `json:"description"`
	// The rest is what the image says of its programs; of image inspect only.
	User       string   `json:"user"`
	Env        []string `json:"env"`
	WorkingDir string   `json:"working_dir"`
	Command    []string `json:"command"`
}

// Checkpoint is a checkpoint.
type Checkpoint struct {
	ID           string   `json:"id"`
	Name         string   `json:"name"`
	Kind         string   `json:"kind"`
	Consistency  string   `json:"consistency"`
	Parent       string   `json:"parent"`
	Machine      string   `json:"machine"`
	MachineID    string   `json:"machine_id"`
	Message      string   `json:"message"`
	CreatedAt    string   `json:"created_at"`
	Spec         Spec     `json:"spec"`
	ImageBuildID string   `json:"image_build_id"`
	Routes       []Route  `json:"routes"`
	DiskBytes    int64    `json:"disk_bytes"`
	MemoryBytes  int64    `json:"memory_bytes"`
	Layers       []string `json:"layers"`
	Automatic    bool     `json:"automatic"`
	Current      bool     `json:"current" doc:"whether it is the head of its machine"`
	// Verification of a disk checkpoint is only done when asked for.
	Verification string `json:"verification" doc:"unverified, verified or failed; of a disk checkpoint empty until checkpoint verify was asked for"`
	Problem      string `json:"problem" doc:"why the verification failed"`
	HookFailure  string `json:"hook_failure" doc:"what went wrong with the guest's hooks of a frozen checkpoint, where --allow-hook-failure was given"`
	// What follows is of full checkpoints.
	Tracking     string          `json:"tracking" doc:"how changed memory was found; of a full checkpoint, as all that follows"`
	MemoryLayers []string        `json:"memory_layers"`
	Pool         uint32          `json:"pool" doc:"standbys wanted"`
	Standbys     uint32          `json:"standbys" doc:"standbys that are ready"`
	Platform     json.RawMessage `json:"platform" doc:"what it rests on: accelerator, QEMU line, machine type, CPU model and so on"`
}

// Route is a published host name, or a TCP route.
type Route struct {
	Host      string `json:"host" doc:"the host name, or of a TCP route its address on the host, 127.0.0.1:PORT"`
	URL       string `json:"url"`
	Machine   string `json:"machine"`
	MachineID string `json:"machine_id"`
	Port      uint32 `json:"port" doc:"the port in the machine"`
	Protocol  string `json:"protocol" doc:"http or tcp"`
	Problem   string `json:"problem" doc:"why the host does not listen for a TCP route"`
}

// RouteChange is one line of a restore's plan.
type RouteChange struct {
	Host      string `json:"host"`
	Change    string `json:"change" doc:"same, changed, added, removed or foreign"`
	Then      uint32 `json:"then" doc:"the port at the checkpoint, 0 for none"`
	Now       uint32 `json:"now" doc:"the port now, 0 for none"`
	Listening string `json:"listening" doc:"yes, no or unknown: whether something will listen on the route's port after the restore"`
	Owner     string `json:"owner" doc:"the other machine that has the host name, of a foreign one"`
	Protocol  string `json:"protocol" doc:"http or tcp"`
}

// Operation is one long-running request.
type Operation struct {
	ID         string `json:"id"`
	RequestID  string `json:"request_id"`
	Verb       string `json:"verb"`
	Machine    string `json:"machine"`
	MachineID  string `json:"machine_id"`
	State      string `json:"state"`
	Phase      string `json:"phase"`
	DoneBytes  int64  `json:"done_bytes"`
	TotalBytes int64  `json:"total_bytes"`
	CreatedAt  string `json:"created_at"`
	EndedAt    string `json:"ended_at"`
	Error      *Error `json:"error"`
}

// Error is a failure.
type Error struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
}

// Check is one thing doctor looked at.
type Check struct {
	Name   string `json:"name"`
	State  string `json:"state"`
	Detail string `json:"detail"`
	Fix    string `json:"fix"`
}

// MachineOf makes the view of a machine.
func MachineOf(m *holdpointv1.Machine) Machine {
	return Machine{
		Name: m.GetName(), ID: m.GetId(), State: m.GetState(),
		Image: m.GetImage(), ImageBuildID: m.GetImageBuildId(), Spec: SpecOf(m.GetSpec()),
		Generation: m.GetGeneration(), RunID: m.GetRunId(), CreatedAt: timeOf(m.GetCreatedAt()),
		Routes: List(m.GetRoutes(), RouteOf), Operation: m.GetOperation(),
		Accelerator: m.GetAccelerator(), QEMUVersion: m.GetQemuVersion(),
		QEMUPID: m.GetQemuPid(), MonitorPID: m.GetMonitorPid(),
		Exit: m.GetExit(), Head: m.GetHead(), ChainLength: m.GetChainLength(),
		FullCheckpoints: m.GetFullCheckpoints(), ForkedFrom: m.GetForkedFrom(), RemoveOnStop: m.GetRemoveOnStop(),
		DiskPath: m.GetDiskPath(),
		Trouble:  m.GetTrouble(), IsolatedBy: m.GetIsolatedBy(), NotIsolated: m.GetNotIsolated(),
	}
}

// SpecOf makes the view of a spec.
func SpecOf(s *holdpointv1.Spec) Spec {
	return Spec{
		MemoryBytes: s.GetMemoryBytes(), CPUs: s.GetCpus(), DiskBytes: s.GetDiskBytes(), DiskFormat: s.GetDiskFormat(),
		Init: s.GetInit(), OnBoot: s.GetOnBoot(), Tmpfs: List(s.GetTmpfs(), same), Network: s.GetNetwork(),
		Allow: List(s.GetNetworkAllow(), same), AllowHost: List(s.GetNetworkAllowHost(), func(p uint32) uint32 { return p }),
		SuspendAfterMS: s.GetSuspendAfterMillis(), Restart: s.GetRestart(),
		CPULimitMillis: s.GetCpuLimitMillis(), MemoryLimit: s.GetMemoryLimitBytes(),
	}
}

// ImageOf makes the view of an image.
func ImageOf(i *holdpointv1.Image) Image {
	return Image{
		Name: i.GetName(), BuildID: i.GetBuildId(), Architecture: i.GetArchitecture(),
		DiskBytes: i.GetDiskBytes(), StoredBytes: i.GetStoredBytes(), CreatedAt: timeOf(i.GetCreatedAt()),
		KernelVersion: i.GetKernelVersion(), Packages: List(i.GetPackages(), same),
		UsedBy: i.GetUsedBy(), Description: i.GetDescription(),
		User: i.GetUser(), Env: List(i.GetEnv(), same), WorkingDir: i.GetWorkingDir(), Command: List(i.GetCommand(), same),
	}
}

// CheckpointOf makes the view of a checkpoint; nil stays nil.
func CheckpointOf(c *holdpointv1.Checkpoint) *Checkpoint {
	if c == nil {
		return nil
	}
	return &Checkpoint{
		ID: c.GetId(), Name: c.GetName(), Kind: c.GetKind(), Consistency: c.GetConsistency(),
		Parent: c.GetParent(), Machine: c.GetMachine(), MachineID: c.GetMachineId(),
		Message: c.GetMessage(), CreatedAt: timeOf(c.GetCreatedAt()), Spec: SpecOf(c.GetSpec()),
		ImageBuildID: c.GetImageBuildId(), Routes: List(c.GetRoutes(), RouteOf),
		DiskBytes: c.GetDiskBytes(), MemoryBytes: c.GetMemoryBytes(),
		Layers: List(c.GetLayers(), same), Automatic: c.GetAutomatic(), Current: c.GetCurrent(),
		Verification: c.GetVerification(), Problem: c.GetProblem(), HookFailure: c.GetHookFailure(), Tracking: c.GetTracking(),
		MemoryLayers: List(c.GetMemoryLayers(), same), Pool: c.GetPool(), Standbys: c.GetStandbys(),
		Platform: object(c.GetPlatform()),
	}
}

// object is text that is JSON; nil, which is null, for anything else.
func object(text string) json.RawMessage {
	if !json.Valid([]byte(text)) {
		return nil
	}
	return json.RawMessage(text)
}

// RouteOf makes the view of a route.
func RouteOf(r *holdpointv1.Route) Route {
	return Route{
		Host: r.GetHost(), URL: r.GetUrl(), Machine: r.GetMachine(), MachineID: r.GetMachineId(), Port: r.GetPort(),
		Protocol: r.GetProtocol(), Problem: r.GetProblem(),
	}
}

// RouteChangeOf makes the view of a line of a restore's plan.
func RouteChangeOf(r *holdpointv1.RouteChange) RouteChange {
	return RouteChange{
		Host: r.GetHost(), Change: r.GetChange(), Then: r.GetThen(), Now: r.GetNow(),
		Listening: r.GetListening(), Owner: r.GetOwner(), Protocol: r.GetProtocol(),
	}
}

// OperationOf makes the view of an operation.
func OperationOf(o *holdpointv1.Operation) Operation {
	v := Operation{
		ID: o.GetId(), RequestID: o.GetRequestId(), Verb: o.GetVerb(),
		Machine: o.GetMachine(), MachineID: o.GetMachineId(), State: StateOf(o.GetState()),
		Phase: o.GetPhase(), DoneBytes: o.GetDoneBytes(), TotalBytes: o.GetTotalBytes(),
		CreatedAt: timeOf(o.GetCreatedAt()), EndedAt: timeOf(o.GetEndedAt()),
	}
	if e := o.GetError(); e != nil {
		v.Error = &Error{Kind: e.GetKind(), Message: e.GetMessage()}
	}
	return v
}

// NotStarted says why a command in a machine could not be started; nil when
// there is no reason, as it was.
func NotStarted(code int32, reason string) *Error {
	if reason == "" {
		return nil
	}
	kind := errdefs.Denied
	if code == 127 {
		kind = errdefs.NotFound
	}
	return &Error{Kind: string(kind), Message: Line(reason)}
}

// CheckOf makes the view of one thing doctor looked at.
func CheckOf(c *holdpointv1.DoctorCheck) Check {
	return Check{Name: c.GetName(), State: c.GetState(), Detail: c.GetDetail(), Fix: c.GetFix()}
}

// StateOf is an operation's state in words: running, done, failed, canceled.
func StateOf(s holdpointv1.OperationState) string {
	switch s {
	case holdpointv1.OperationState_OPERATION_STATE_RUNNING:
		return "running"
	case holdpointv1.OperationState_OPERATION_STATE_DONE:
		return "done"
	case holdpointv1.OperationState_OPERATION_STATE_FAILED:
		return "failed"
	case holdpointv1.OperationState_OPERATION_STATE_CANCELED:
		return "canceled"
	}
	return "unknown"
}

// List makes the views of a list; it is never nil, so that JSON has [] and not
// null.
func List[From, To any](from []From, view func(From) To) []To {
	to := make([]To, 0, len(from))
	for _, f := range from {
		to = append(to, view(f))
	}
	return to
}

func same(s string) string { return s }

// timeOf is RFC 3339 in UTC with milliseconds; empty for no time.
func timeOf(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return t.AsTime().UTC().Format("2006-01-02T15:04:05.000Z07:00")
}

// TimeOf is the time of a stamp; zero for none.
func TimeOf(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

// Notes makes the view of lines a person should read.
func Notes(notes []string) []string { return List(notes, same) }

// Stamp makes the view of a time.
func Stamp(t *timestamppb.Timestamp) string { return timeOf(t) }
