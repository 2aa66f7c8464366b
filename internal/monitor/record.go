//go:build linux

package monitor

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// Phase is where a run is in its life.
type Phase string

// The phases. A run is booting from its launch to the guest's first answer.
// Held is one that a capture left paused, until its SettleCapture says how it
// goes on. A successor lets the CPUs of any phase go but those of UserPaused
// and Held, and of a run that continues and waits for Activate.
const (
	Booting    Phase = "booting"
	Running    Phase = "running"
	Window     Phase = "window"
	Held       Phase = "held"
	UserPaused Phase = "user-paused"
	Exited     Phase = "exited"
)

// Record is record.json in the run's folder: the truth about the run, written
// by its monitor before each change of phase. While a monitor lives, the phase
// is at most one step ahead of the machine; a successor completes that step.
type Record struct {
	Version   int    `json:"version"`
	MachineID string `json:"machine_id"`
	// RunID changes when the guest reboots.
	RunID string `json:"run_id"`
	Phase Phase  `json:"phase"`
	// Process is nil from before a launch until it is done.
	Process *machine.Process `json:"process,omitempty"`
	// Disk is the chain to boot from, lowest first.
	Disk []machine.Layer `json:"disk"`
	// Switching says that the last one of Disk was about to become the top
	// and may not be it yet: then it is empty and booting from it is harmless.
	Switching bool `json:"switching,omitempty"`
	// SaidClean is set once the guest agent has answered Shutdown.
	SaidClean bool `json:"said_clean,omitempty"`
	// ReadyUnixNano is the wall clock of this run's first ready, 0 before.
	ReadyUnixNano int64 `json:"ready_unix_nano,omitempty"`
	// ClosedSockets to the outside are those that the guest gave up when it
	// was continued.
	ClosedSockets uint32 `json:"closed_sockets,omitempty"`
	// Activation is what a run of a Config with Wait was told; nil before.
	Activation *Activation `json:"activation,omitempty"`
	// Capture is the one whose window was opened and of which SettleCapture
	// has not said yet what became of it.
	Capture *Capture `json:"capture,omitempty"`
	// Head is the last published capture of this run; empty before.
	Head string `json:"head,omitempty"`
	Exit *Exit  `json:"exit,omitempty"`
	// Failure is why the run could not be launched or adopted.
	Failure *Failure `json:"failure,omitempty"`
}

// Capture is one of the run, from just before its window on.
type Capture struct {
	CheckpointID string `json:"checkpoint_id"`
	RunID        string `json:"run_id"`
	// Dir is the staging folder.
	Dir string `json:"dir"`
	// Answer is the CaptureResponse, in the JSON form of protobuf; empty until
	// the window has closed and the files are there. A successor that finds none
	// takes the capture for failed.
	Answer json.RawMessage `json:"answer,omitempty"`
}

// Exit is how the run ended.
type Exit struct {
	machine.Exit
	// Clean is true only if we asked the guest to shut down, its agent said
	// that its file systems are clean, and QEMU then exited by the guest's
	// own power-off. A guest that powers off unasked never tells us, so that
	// is not clean.
	Clean bool `json:"clean"`
}

// Failure is an error that outlives its process.
type Failure struct {
	Kind    errdefs.Kind `json:"kind"`
	Message string       `json:"message"`
}

// Err is the failure as an error; nil for none.
func (f *Failure) Err() error {
	if f == nil {
		return nil
	}
	return errdefs.New(f.Kind, "%s", f.Message)
}

// ReadRecord reads the record of the run's folder dir. NOT_FOUND means that no
// monitor has begun there.
func ReadRecord(dir string) (Record, error) {
	var rec Record
	if err := readJSON(filepath.Join(dir, recordFile), &rec); err != nil {
		return Record{}, err
	}
	return rec, checkVersion(filepath.Join(dir, recordFile), rec.Version, recordVersion)
}

// WriteRecord is for the monitor's process alone.
func WriteRecord(files *durable.FS, dir string, rec Record) error {
	rec.Version = recordVersion
	b, err := json.MarshalIndent(rec, "", "  ")
	if err != nil {
		return fmt.Errorf("encode record of run %s: %w", rec.RunID, err)
	}
	return files.WriteFile(filepath.Join(dir, recordFile), append(b, '\n'), 0o600)
}

// Clone is a copy that shares nothing that is changed in place.
func (r Record) Clone() Record {
	r.Disk = slices.Clone(r.Disk)
	if r.Capture != nil {
		taken := *r.Capture
		r.Capture = &taken
	}
	return r
}

// Resumed is the phase that follows a pause.
func (r Record) Resumed() Phase {
	if r.ReadyUnixNano == 0 {
		return Booting
	}
	return Running
}

// Proto is the phase in the API.
func (p Phase) Proto() monitorv1.Phase {
	switch p {
	case Booting:
		return monitorv1.Phase_PHASE_BOOTING
	case Running:
		return monitorv1.Phase_PHASE_RUNNING
	case Window, Held:
		return monitorv1.Phase_PHASE_WINDOW
	case UserPaused:
		return monitorv1.Phase_PHASE_USER_PAUSED
	case Exited:
		return monitorv1.Phase_PHASE_EXITED
	}
	return monitorv1.Phase_PHASE_UNSPECIFIED
}

// Proto is the end in the API; nil stays nil.
func (e *Exit) Proto() *monitorv1.Exit {
	if e == nil {
		return nil
	}
	return &monitorv1.Exit{Reason: string(e.Reason), Clean: e.Clean, Message: e.Message}
}

// Why is the reason of the end, for people.
func (e *Exit) Why() string {
	if e == nil {
		return "never launched"
	}
	return string(e.Reason)
}

// Owner is the machine whose run is in dir, as its record says, or its config
// before there is one; empty when neither can be read.
func Owner(dir string) string {
	if rec, err := ReadRecord(dir); err == nil {
		return rec.MachineID
	}
	cfg, err := ReadConfig(dir)
	if err != nil {
		return ""
	}
	return cfg.Run.MachineID
}
