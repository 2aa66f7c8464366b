package operation

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Work is one running operation, as its body sees it.
type Work struct {
	engine *Engine
	cancel context.CancelCauseFunc

	mu     sync.Mutex
	record catalog.Operation
	view   *holdpointv1.Operation
	notes  []string
	// changed is closed and replaced at each change of view.
	changed chan struct{}
}

// ID is the operation's id.
func (w *Work) ID() string { return w.record.ID }

// Enter records that the operation enters a phase, with what is needed to
// finish or undo it from there, before the phase's first effect. text is the
// phase for people.
func (w *Work) Enter(ctx context.Context, phase, text string, detail any) error {
	encoded, err := json.Marshal(detail)
	if err != nil {
		return fmt.Errorf("encode operation detail: %w", err)
	}
	progress := catalog.Progress{Phase: phase, Detail: encoded, MachineID: w.record.MachineID, MachineName: w.record.MachineName}
	if err := w.engine.Journal.UpdateOperation(ctx, w.record.ID, progress); err != nil {
		return fmt.Errorf("record phase %s: %w", phase, err)
	}
	w.mu.Lock()
	w.record.Phase, w.record.Detail = phase, encoded
	w.mu.Unlock()
	w.Say(text)
	return nil
}

// Say tells watchers what the operation does now; nothing is recorded.
func (w *Work) Say(text string) {
	w.update(func() { w.view.Phase, w.view.DoneBytes, w.view.TotalBytes = text, 0, 0 })
}

// Progress tells watchers how far the phase is, in bytes; total 0 is unknown.
func (w *Work) Progress(done, total int64) {
	w.update(func() { w.view.DoneBytes, w.view.TotalBytes = done, total })
}

// Copying is Progress of the copy of a disk, in whatever phase that is made.
func (w *Work) Copying(done, total int64) {
	w.update(func() { w.view.Phase, w.view.DoneBytes, w.view.TotalBytes = "copying the disk", done, total })
}

// Note keeps a line that a person should read with the result.
func (w *Work) Note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.notes = append(w.notes, fmt.Sprintf(format, args...))
}

// Machine names the machine of an operation that makes it. It is recorded with
// the next phase.
func (w *Work) Machine(id, name string) {
	w.mu.Lock()
	w.record.MachineID, w.record.MachineName = id, name
	w.mu.Unlock()
	w.update(func() { w.view.MachineId, w.view.Machine = id, name })
}

// Snapshot is the operation as it is now.
func (w *Work) Snapshot() *holdpointv1.Operation {
	w.mu.Lock()
	defer w.mu.Unlock()
	return proto.CloneOf(w.view)
}

func (w *Work) update(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
	close(w.changed)
	w.changed = make(chan struct{})
}

// Ended reports whether the operation has an outcome.
func Ended(op *holdpointv1.Operation) bool {
	return op.GetState() != holdpointv1.OperationState_OPERATION_STATE_RUNNING
}

// Describe is a recorded operation in the API's terms.
func Describe(op catalog.Operation) *holdpointv1.Operation {
	view := &holdpointv1.Operation{
		Id: op.ID, RequestId: op.RequestID, Verb: op.Verb, MachineId: op.MachineID, Machine: op.MachineName,
		Phase: op.Phase, CreatedAt: timestamppb.New(op.CreatedAt),
	}
	switch op.State {
	case catalog.OperationDone:
		view.State = holdpointv1.OperationState_OPERATION_STATE_DONE
	case catalog.OperationFailed:
		view.State = holdpointv1.OperationState_OPERATION_STATE_FAILED
	case catalog.OperationCanceled:
		view.State = holdpointv1.OperationState_OPERATION_STATE_CANCELED
	default:
		view.State = holdpointv1.OperationState_OPERATION_STATE_RUNNING
		return view
	}
	view.EndedAt = timestamppb.New(op.EndedAt)
	if op.ErrorKind != "" {
		view.Error = &holdpointv1.ErrorInfo{Kind: string(op.ErrorKind), Message: op.ErrorMessage}
	}
	view.Result = &holdpointv1.OperationResult{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(op.Result, view.Result); err != nil && len(op.Result) > 0 {
		view.Error = &holdpointv1.ErrorInfo{Kind: string(errdefs.Storage), Message: fmt.Sprintf("read result of operation %s: %v", op.ID, err)}
	}
	return view
}
