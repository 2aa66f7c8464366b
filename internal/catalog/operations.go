package catalog

import (
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const selectOperation = `SELECT id, request_id, verb, options, machine_id, machine_name, phase, state, detail,
	error_kind, error_message, result, created_at, ended_at, options_digest FROM operations `

type operationRow struct {
	Operation
	digest string
}

func scanOperationRow(rows *sql.Rows) (operationRow, error) {
	var (
		o              operationRow
		created, ended int64
	)
	err := rows.Scan(&o.ID, &o.RequestID, &o.Verb, &o.Options, &o.MachineID, &o.MachineName, &o.Phase, &o.State, &o.Detail,
		&o.ErrorKind, &o.ErrorMessage, &o.Result, &created, &ended, &o.digest)
	o.CreatedAt, o.EndedAt = fromNano(created), fromNano(ended)
	return o, err
}

func scanOperation(rows *sql.Rows) (Operation, error) {
	o, err := scanOperationRow(rows)
	return o.Operation, err
}

// digest identifies verb and options, whatever the layout of their JSON.
func digest(verb string, options []byte) (string, error) {
	d := json.NewDecoder(bytes.NewReader([]byte(orEmpty(options))))
	d.UseNumber() // as floats, large numbers would look the same
	var v any
	if err := d.Decode(&v); err != nil {
		return "", errdefs.New(errdefs.Invalid, "admit %s: its options are no JSON: %w", verb, err)
	}
	canonical, err := json.Marshal(v)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(append([]byte(verb+"\x00"), canonical...))
	return hex.EncodeToString(sum[:]), nil
}

// Admit records an operation, before its first effect, together with the
// leases on claims until ttl from now. The same request id with the same verb
// and options gives the operation recorded first and existing = true; with
// others it is REQUEST_ID_CONFLICT. A claim that another operation holds is
// MACHINE_BUSY or REFERENCED, as for Acquire, and nothing is recorded.
func (c *Catalog) Admit(ctx context.Context, o Operation, ttl time.Duration, claims ...Claim) (op Operation, existing bool, err error) {
	sum, err := digest(o.Verb, o.Options)
	if err != nil {
		return Operation{}, false, err
	}
	err = c.write(ctx, "admit-operation", func(t *tx) error {
		old, err := all(ctx, t, scanOperationRow, selectOperation+`WHERE request_id = ?`, o.RequestID)
		if err != nil {
			return err
		}
		if len(old) > 0 {
			if old[0].digest != sum {
				return errdefs.New(errdefs.RequestIDConflict, "admit %s: request id %q belongs to operation %s (%s) with other options; use a new request id",
					o.Verb, o.RequestID, old[0].ID, old[0].Verb)
			}
			op, existing = old[0].Operation, true
			return nil
		}
		err = t.exec(`INSERT INTO operations (id, request_id, verb, options, options_digest, machine_id, machine_name, phase, state,
			detail, error_kind, error_message, result, created_at, ended_at)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'running', ?, '', '', '{}', ?, 0)`,
			o.ID, o.RequestID, o.Verb, orEmpty(o.Options), sum, o.MachineID, o.MachineName, o.Phase, orEmpty(o.Detail), t.orNow(o.CreatedAt))
		if err != nil {
			return err
		}
		if err := acquire(t, o.ID, t.now.Add(ttl), claims); err != nil {
			return err
		}
		op, err = one(ctx, t, noOperation(o.ID), scanOperation, selectOperation+`WHERE id = ?`, o.ID)
		return err
	})
	if err != nil {
		return Operation{}, false, err
	}
	return op, existing, nil
}

// Progress is what UpdateOperation changes; empty fields stay as they are.
type Progress struct {
	Phase  string
	Detail []byte
	// MachineID and MachineName are set by verbs that make the machine.
	MachineID   string
	MachineName string
}

// UpdateOperation records how far a running operation came. It is durable, so
// that a later daemon finishes or undoes by it; progress in bytes is not for here.
func (c *Catalog) UpdateOperation(ctx context.Context, id string, p Progress) error {
	return c.write(ctx, "update-operation", func(t *tx) error {
		return t.execOne(notRunning(id), `UPDATE operations SET phase = coalesce(nullif(?, ''), phase),
			detail = coalesce(nullif(?, ''), detail), machine_id = coalesce(nullif(?, ''), machine_id),
			machine_name = coalesce(nullif(?, ''), machine_name) WHERE id = ? AND state = 'running'`,
			p.Phase, string(p.Detail), p.MachineID, p.MachineName, id)
	})
}

// UpdatePhase is UpdateOperation of phase and detail.
func (c *Catalog) UpdatePhase(ctx context.Context, id, phase string, detail []byte) error {
	return c.UpdateOperation(ctx, id, Progress{Phase: phase, Detail: detail})
}

// Outcome is how an operation ended.
type Outcome struct {
	// State is done, failed or canceled.
	State OperationState
	// Err is why it is not done; its kind and message are kept.
	Err error
	// Result is JSON.
	Result []byte
}

// Finish records the outcome of a running operation and gives back its leases
// and what it displaced, in one commit. Long-ended operations are pruned.
func (c *Catalog) Finish(ctx context.Context, id string, out Outcome) error {
	message := ""
	if out.Err != nil {
		message = oneLine(out.Err.Error())
	}
	return c.write(ctx, "finish-operation", func(t *tx) error {
		err := t.execOne(notRunning(id), `UPDATE operations SET state = ?, error_kind = ?, error_message = ?, result = ?, ended_at = ?
			WHERE id = ? AND state = 'running'`,
			out.State, errdefs.KindOf(out.Err), message, orEmpty(out.Result), t.now.UnixNano(), id)
		if err != nil {
			return err
		}
		if err := t.exec(`DELETE FROM leases WHERE operation_id = ?`, id); err != nil {
			return err
		}
		if err := dropDisplaced(t, id); err != nil {
			return err
		}
		return t.exec(`DELETE FROM operations WHERE state <> 'running' AND seq <=
			(SELECT seq FROM operations WHERE state <> 'running' ORDER BY seq DESC LIMIT 1 OFFSET ?)`, c.cfg.KeepOperations)
	})
}

// GetOperation gives the operation of an id; NOT_FOUND if there is none.
func (c *Catalog) GetOperation(ctx context.Context, id string) (Operation, error) {
	o, err := one(ctx, c.r, noOperation(id), scanOperation, selectOperation+`WHERE id = ?`, id)
	return o, c.storage(err)
}

// ListOperations gives the operations of a machine, or of all when the id is
// empty, newest first; ended ones only if ended is true.
func (c *Catalog) ListOperations(ctx context.Context, machineID string, ended bool) ([]Operation, error) {
	where := `WHERE state = 'running' AND (?1 = '' OR machine_id = ?1)`
	if ended {
		where = `WHERE ?1 = '' OR machine_id = ?1`
	}
	list, err := all(ctx, c.r, scanOperation, selectOperation+where+` ORDER BY seq DESC`, machineID)
	return list, c.storage(err)
}

// Unfinished gives the running operations, oldest first: what a starting
// daemon finishes or undoes.
func (c *Catalog) Unfinished(ctx context.Context) ([]Operation, error) {
	list, err := all(ctx, c.r, scanOperation, selectOperation+`WHERE state = 'running' ORDER BY seq`)
	return list, c.storage(err)
}

func noOperation(ref string) error { return notFound("operation", ref, "holdpoint operation ls --all") }

func notRunning(id string) error {
	return errdefs.New(errdefs.WrongState, "record operation %s: it is not running; see holdpoint operation show %s", id, id)
}
