package operation

import (
	"context"
	"time"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
)

// How long after a first and a later attempt an outcome is tried to be recorded again,
// and how long that may take.
const (
	firstAgain   = 200 * time.Millisecond
	lastAgain    = 5 * time.Second
	againTimeout = 15 * time.Minute
)

// unrecorded is an operation that has ended, and still holds what it held.
type unrecorded struct {
	out  catalog.Outcome
	wait time.Duration
}

// putOff has an outcome recorded later. The caller has e.mu.
func (e *Engine) putOff(op catalog.Operation, out catalog.Outcome) {
	u := e.unrecorded[op.ID]
	if u == nil {
		u = &unrecorded{out: out, wait: firstAgain}
		e.unrecorded[op.ID] = u
	} else {
		u.wait = min(2*u.wait, lastAgain)
	}
	if e.closed {
		return // the next start settles it
	}
	wait := u.wait
	e.later.Go(func() {
		select {
		case <-time.After(wait):
			e.again(op.ID, u.out)
		case <-e.closing:
		}
	})
}

// again records the outcome of an operation that is done, or settles one that has
// failed by its phase: what it could not undo may be undone by now.
func (e *Engine) again(id string, out catalog.Outcome) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	op, err := e.Journal.GetOperation(ctx, id)
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil || e.closed {
		e.putOff(catalog.Operation{ID: id}, out)
		return
	}
	e.start(op, againTimeout, func(ctx context.Context, w *Work) (*holdpointv1.OperationResult, error) {
		if out.State == catalog.OperationDone {
			return Describe(catalog.Operation{State: out.State, Result: out.Result}).GetResult(), nil
		}
		if e.Settle != nil && op.Phase != "" {
			if result, err := e.Settle(ctx, w, op); err == nil && result != nil {
				return result, nil
			}
		}
		return nil, out.Err
	})
}
