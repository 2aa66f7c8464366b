package view

import holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"

// MachineObject is what inspect prints.
type MachineObject struct {
	Header
	Machine Machine `json:"machine"`
	Refused uint64  `json:"refused" doc:"how often its network has refused something since the machine's monitor began"`
}

// MachineRemoved is what rm prints: the machine as it was.
type MachineRemoved struct {
	Header
	Machine            Machine  `json:"machine"`
	RemovedCheckpoints uint32   `json:"removed_checkpoints" doc:"how many went with it"`
	Operation          string   `json:"operation"`
	Notes              []string `json:"notes"`
}

// MachineDone is what run, start, stop, pause and resume print.
type MachineDone struct {
	Header
	Machine   Machine  `json:"machine"`
	Operation string   `json:"operation"`
	Notes     []string `json:"notes"`
}

// Machines is what ls prints.
type Machines struct {
	Header
	Machines []Machine `json:"machines"`
}

// ImageObject is what image inspect prints.
type ImageObject struct {
	Header
	Image Image `json:"image"`
}

// ImageDone is what image build and image rm print.
type ImageDone struct {
	Header
	Image     Image    `json:"image"`
	Operation string   `json:"operation"`
	Notes     []string `json:"notes"`
}

// Images is what image ls prints.
type Images struct {
	Header
	Images []Image `json:"images"`
}

// CheckpointObject is what checkpoint show prints.
type CheckpointObject struct {
	Header
	Checkpoint *Checkpoint `json:"checkpoint"`
}

// CheckpointRemoved is what checkpoint rm prints: the checkpoint as it was.
type CheckpointRemoved struct {
	Header
	Checkpoint *Checkpoint `json:"checkpoint"`
	Operation  string      `json:"operation"`
	Notes      []string    `json:"notes"`
}

// CheckpointVerified is what checkpoint verify prints of a proven checkpoint.
type CheckpointVerified struct {
	Header
	Checkpoint *Checkpoint `json:"checkpoint"`
	Layers     uint32      `json:"layers" doc:"layers whose content was checked"`
	Bytes      int64       `json:"bytes"`
	Restored   bool        `json:"restored" doc:"it was restored aside and answered; false for a disk checkpoint"`
	Operation  string      `json:"operation"`
	Notes      []string    `json:"notes"`
}

// CheckpointDone is what checkpoint pool prints.
type CheckpointDone struct {
	Header
	Checkpoint *Checkpoint `json:"checkpoint"`
	Operation  string      `json:"operation"`
	Notes      []string    `json:"notes"`
}

// CheckpointCreated is what checkpoint create prints. Times are milliseconds:
// the machine's standstill, until it answered again, until the checkpoint was
// safe, and the parts of these.
type CheckpointCreated struct {
	Header
	Checkpoint     *Checkpoint `json:"checkpoint"`
	TimesKnown     bool        `json:"times_known" doc:"false when the daemon ended meanwhile: the times are 0 then"`
	DowntimeMS     float64     `json:"downtime_ms"`
	ReturnMS       float64     `json:"return_ms" doc:"0 if it did not answer"`
	DurableMS      float64     `json:"durable_ms"`
	StopMS         float64     `json:"stop_ms" doc:"part of the downtime of a stopped checkpoint, as copy_ms and boot_ms"`
	CopyMS         float64     `json:"copy_ms"`
	BootMS         float64     `json:"boot_ms"`
	Phases         *Phases     `json:"phases" doc:"of a full checkpoint"`
	Freeze         *Freeze     `json:"freeze" doc:"of a frozen checkpoint"`
	MemoryBytes    int64       `json:"memory_bytes"`
	DiskBytes      int64       `json:"disk_bytes"`
	DiskCopy       string      `json:"disk_copy" doc:"how a raw disk was copied: reflink (its blocks are shared) or data; empty for any other disk"`
	RestoreCommand string      `json:"restore_command"`
	Operation      string      `json:"operation"`
	Notes          []string    `json:"notes"`
}

// Phases are where the time of a full checkpoint went.
type Phases struct {
	PrepareMS       float64 `json:"prepare_ms" doc:"the new top of the disk was made; prepare_ms, capture_ms, encode_ms and publish_ms make durable_ms"`
	CaptureMS       float64 `json:"capture_ms" doc:"the state was taken; precopy_ms, sync_disk_ms and the window are parts of it"`
	PrecopyMS       float64 `json:"precopy_ms" doc:"memory was copied while the machine ran on"`
	PrecopyRounds   uint32  `json:"precopy_rounds"`
	PrecopiedBytes  int64   `json:"precopied_bytes"`
	SyncDiskMS      float64 `json:"sync_disk_ms" doc:"the host wrote the disk's old top, while the machine ran on"`
	WindowStopMS    float64 `json:"window_stop_ms" doc:"the CPUs were stopped; this and what begins with window_ is part of the downtime"`
	WindowDevicesMS float64 `json:"window_devices_ms" doc:"the devices' state was written"`
	WindowSwitchMS  float64 `json:"window_switch_ms" doc:"the disk was switched to a new layer"`
	WindowPagesMS   float64 `json:"window_pages_ms" doc:"the last memory was copied, beside the devices and the switch"`
	WindowResumeMS  float64 `json:"window_resume_ms" doc:"the CPUs were let go"`
	WindowBytes     int64   `json:"window_bytes"`
	EncodeMS        float64 `json:"encode_ms" doc:"the memory was made a layer, while the machine ran on"`
	PublishMS       float64 `json:"publish_ms" doc:"the checkpoint was recorded"`
}

// PhasesOf makes the view of a full checkpoint's phases; nil for others.
func PhasesOf(r *holdpointv1.CheckpointResult) *Phases {
	if r.GetCheckpoint().GetKind() != "full" {
		return nil
	}
	return &Phases{
		PrecopyMS: r.GetPrecopyMs(), PrecopyRounds: r.GetPrecopyRounds(), PrecopiedBytes: r.GetPrecopiedBytes(),
		WindowStopMS: r.GetWindowStopMs(), WindowDevicesMS: r.GetWindowDevicesMs(), WindowSwitchMS: r.GetWindowSwitchMs(),
		WindowPagesMS: r.GetWindowPagesMs(), WindowResumeMS: r.GetWindowResumeMs(), WindowBytes: r.GetWindowBytes(),
		PrepareMS: r.GetPrepareMs(), CaptureMS: r.GetCaptureMs(), SyncDiskMS: r.GetSyncDiskMs(),
		EncodeMS: r.GetEncodeMs(), PublishMS: r.GetPublishMs(),
	}
}

// Freeze is where the time of a frozen checkpoint went.
type Freeze struct {
	PrepareMS float64 `json:"prepare_ms" doc:"the new top of the disk was made; prepare_ms, capture_ms and publish_ms make durable_ms"`
	CaptureMS float64 `json:"capture_ms" doc:"what follows, but for publish_ms, and the hooks after the thaw"`
	HooksMS   float64 `json:"hooks_ms" doc:"the guest's hooks before the freeze"`
	SyncMS    float64 `json:"sync_ms" doc:"the guest wrote out what waited, before the freeze"`
	FreezeMS  float64 `json:"freeze_ms" doc:"until the last file system was frozen; part of the downtime, as switch_ms"`
	SwitchMS  float64 `json:"switch_ms" doc:"the disk was switched to a new layer"`
	PublishMS float64 `json:"publish_ms" doc:"the checkpoint was sealed and recorded"`
}

// FreezeOf makes the view of a frozen checkpoint's freeze; nil for others.
func FreezeOf(r *holdpointv1.CheckpointResult) *Freeze {
	if r.GetCheckpoint().GetConsistency() != "frozen" {
		return nil
	}
	return &Freeze{
		PrepareMS: r.GetPrepareMs(), CaptureMS: r.GetCaptureMs(), HooksMS: r.GetHooksMs(), SyncMS: r.GetSyncMs(),
		FreezeMS: r.GetFreezeMs(), SwitchMS: r.GetSwitchMs(), PublishMS: r.GetPublishMs(),
	}
}

// Suspended is what suspend prints: the machine, and the checkpoint it goes on
// from.
type Suspended struct {
	Header
	Machine    Machine     `json:"machine"`
	Checkpoint *Checkpoint `json:"checkpoint" doc:"what resume goes on from"`
	DurableMS  float64     `json:"durable_ms" doc:"0 when it was suspended before"`
	Operation  string      `json:"operation"`
	Notes      []string    `json:"notes"`
}

// Forked is what fork prints. Each machine can fail alone.
type Forked struct {
	Header
	Machines   []ForkedMachine `json:"machines"`
	Checkpoint *Checkpoint     `json:"checkpoint" doc:"what was taken of the running machine first, else null"`
	Operation  string          `json:"operation"`
	Notes      []string        `json:"notes"`
}

// ForkedMachine is one machine of a fork, with the command that ran in it.
type ForkedMachine struct {
	Name     string   `json:"name" doc:"the name it has, or would have had"`
	ID       string   `json:"id" doc:"empty when there is no machine"`
	State    string   `json:"state"`
	Error    *Error   `json:"error" doc:"why there is no machine, or no end of its command"`
	Index    uint32   `json:"index" doc:"FORK_INDEX, from 1"`
	ReadyMS  float64  `json:"ready_ms" doc:"from its turn to its first answer"`
	Command  *Command `json:"command"`
	Detached bool     `json:"detached"`
	ExitCode *int32   `json:"exit_code" doc:"the command's, when it has ended or could not be started"`
	Stdout   string   `json:"stdout"`
	Stderr   string   `json:"stderr"`
	// Truncated says that output beyond the limit of 1 MiB was dropped.
	Truncated bool `json:"truncated" doc:"output of more than 1 MiB was dropped"`
}

// ForkedOf makes the view of one machine of a fork.
func ForkedOf(f *holdpointv1.ForkResult) ForkedMachine {
	v := ForkedMachine{
		Name: f.GetName(), ID: f.GetMachine().GetId(), State: f.GetMachine().GetState(), Index: f.GetIndex(), ReadyMS: f.GetReadyMs(),
	}
	if e := f.GetError(); e != nil {
		v.Error = &Error{Kind: e.GetKind(), Message: Line(e.GetMessage())}
	}
	return v
}

// Checkpoints is what checkpoint ls prints, newest first.
type Checkpoints struct {
	Header
	Checkpoints []*Checkpoint `json:"checkpoints"`
}

// Log is what log prints: the machines and their checkpoints, newest first.
type Log struct {
	Header
	Machines    []Machine     `json:"machines"`
	Checkpoints []*Checkpoint `json:"checkpoints"`
}

// RestorePlan is what restore --plan prints. A machine's newer checkpoints are
// kept; its commands end. Starts says that the machine is stopped or suspended
// now, and will be started.
type RestorePlan struct {
	Header
	Machine    string        `json:"machine"`
	Checkpoint *Checkpoint   `json:"checkpoint"`
	Starts     bool          `json:"starts" doc:"the machine is stopped or suspended and will be started"`
	Routes     []RouteChange `json:"routes"`
	Newer      []*Checkpoint `json:"newer" doc:"checkpoints made since then, newest first; they are kept"`
	Commands   []string      `json:"commands" doc:"commands that run now and will end"`
	// CommandsUnknown says that the guest did not answer.
	CommandsUnknown bool     `json:"commands_unknown" doc:"the guest does not answer, so that commands is empty"`
	Effects         []Effect `json:"effects" doc:"what happened outside the disk since then, oldest first, and is not undone"`
}

// Effect is what happened outside the disk since the checkpoint: a host name
// published or withdrawn, a path copied out. A restore does not undo it.
type Effect struct {
	Kind string `json:"kind"`
	What string `json:"what"`
	At   string `json:"at"`
}

// EffectOf makes the view of an effect.
func EffectOf(e *holdpointv1.Effect) Effect {
	return Effect{Kind: e.GetKind(), What: e.GetWhat(), At: timeOf(e.GetAt())}
}

// Restored is what restore prints. safety is what was kept of the discarded
// state; null and no undo_command with --no-safety.
type Restored struct {
	Header
	Machine     Machine       `json:"machine"`
	Restored    *Checkpoint   `json:"restored"`
	Safety      *Checkpoint   `json:"safety"`
	UndoCommand string        `json:"undo_command"`
	Routes      []RouteChange `json:"routes"`
	Generation  uint64        `json:"generation"`
	DowntimeMS  float64       `json:"downtime_ms"`
	RunningMS   float64       `json:"running_ms" doc:"of --full: until its CPUs ran"`
	AnswerMS    float64       `json:"answer_ms" doc:"of --full: until it answered"`
	Closed      uint32        `json:"closed_sockets" doc:"of --full: connections to the outside that were open then and are closed now"`
	From        string        `json:"from" doc:"of --full: standby, memory-file or layers, what it was restored from"`
	Operation   string        `json:"operation"`
	Notes       []string      `json:"notes"`
}

// Routes is what routes prints.
type Routes struct {
	Header
	Routes []Route `json:"routes"`
}

// RoutesDone is what expose and unexpose print.
type RoutesDone struct {
	Header
	Routes    []Route  `json:"routes"`
	Operation string   `json:"operation"`
	Notes     []string `json:"notes"`
}

// OperationObject is what operation show, wait and cancel print.
type OperationObject struct {
	Header
	Operation Operation `json:"operation"`
}

// Operations is what operation ls prints, newest first.
type Operations struct {
	Header
	Operations []Operation `json:"operations"`
}

// Command is a command in a machine.
type Command struct {
	ID  string `json:"id"`
	PID int32  `json:"pid"`
}

// Executed is what exec and attach print; stdout and stderr are empty for a
// command that goes on by itself (--detach). Error says why a command could
// not be started (exit code 126 or 127), and is null when it was.
type Executed struct {
	Header
	Command  Command `json:"command"`
	Detached bool    `json:"detached"`
	ExitCode int32   `json:"exit_code"`
	Error    *Error  `json:"error" doc:"why the command could not be started (exit_code 126 or 127)"`
	Stdout   string  `json:"stdout"`
	Stderr   string  `json:"stderr"`
	// Truncated says that output beyond the limit of 16 MiB was dropped.
	Truncated bool `json:"truncated"`
}

// Copied is what cp prints.
type Copied struct {
	Header
	Files uint64 `json:"files"`
	Bytes uint64 `json:"bytes"`
}

// Logged is what logs prints.
type Logged struct {
	Header
	Machine string `json:"machine"`
	Log     string `json:"log" doc:"the console, or with --route the lines of that route; empty with --network"`
	// Refused and Refusals are of --network.
	Refused  uint64    `json:"refused" doc:"with --network: how often the machine was refused a destination since its monitor began"`
	Refusals []Refusal `json:"refusals" doc:"with --network: the last 256 different ones, the last one first"`
}

// DaemonStatus is what daemon start, stop and status print; after a stop the
// pid is the one that was.
type DaemonStatus struct {
	Header
	PID       int64  `json:"pid"`
	Build     string `json:"build"`
	Home      string `json:"home"`
	Proxy     string `json:"proxy"`
	Machines  uint32 `json:"machines"`
	Running   uint32 `json:"running"`
	StartedAt string `json:"started_at"`
}

// DaemonStopped is what daemon stop prints; the pid is 0 when none ran.
type DaemonStopped struct {
	Header
	PID  int64  `json:"pid"`
	Home string `json:"home"`
}

// Doctor is what doctor prints; states are ok, degraded, failed.
type Doctor struct {
	Header
	Checks []Check `json:"checks"`
}

// Version is what version prints.
type Version struct {
	Header
	Version string `json:"version"`
	Build   string `json:"build"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
}

// Failure is what every verb prints when it fails.
type Failure struct {
	Header
	Error Error `json:"error"`
}
