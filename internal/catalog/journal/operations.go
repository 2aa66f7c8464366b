package journal

import (
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
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
	o.CreatedAt, o.EndedAt = database.Time(created), database.Time(ended)
	return o, err
}

func scanOperation(rows *sql.Rows) (Operation, error) {
	o, err := scanOperationRow(rows)
	return o.Operation, err
}

// digest identifies verb and options, whatever the layout of their JSON.
func digest(verb string, options []byte) (string, error) {
	d := json.NewDecoder(bytes.NewReader([]byte(database.JSON(options))))
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
func (j *Journal) Admit(ctx context.Context, o Operation, ttl time.Duration, claims ...Claim) (op Operation, existing bool, err error) {
	sum, err := digest(o.Verb, o.Options)
	if err != nil {
		return Operation{}, false, err
	}
	err = j.cfg.DB.Write(ctx, "admit-operation", func(t *database.Tx) error {
		old, err := database.All(ctx, t, scanOperationRow, selectOperation+`WHERE request_id = ?`, o.RequestID)
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
		err = t.Do(`INSERT INTO operations (id, request_id, verb, options, options_digest, machine_id, machine_name, phase, state,
			detail, error_kind, error_message, result, created_at, ended_at)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'running', ?, '', '', '{}', ?, 0)`,
			o.ID, o.RequestID, o.Verb, database.JSON(o.Options), sum, o.MachineID, o.MachineName, o.Phase, database.JSON(o.Detail), t.OrNow(o.CreatedAt))
		if err != nil {
			return err
		}
		if err := acquire(t, o.ID, t.Now.Add(ttl), claims); err != nil {
			return err
		}
		op, err = database.One(ctx, t, NotFound(o.ID), scanOperation, selectOperation+`WHERE id = ?`, o.ID)
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
func (j *Journal) UpdateOperation(ctx context.Context, id string, p Progress) error {
	return j.cfg.DB.Write(ctx, "update-operation", func(t *database.Tx) error {
		return t.DoOne(notRunning(id), `UPDATE operations SET phase = coalesce(nullif(?, ''), phase),
			detail = coalesce(nullif(?, ''), detail), machine_id = coalesce(nullif(?, ''), machine_id),
			machine_name = coalesce(nullif(?, ''), machine_name) WHERE id = ? AND state = 'running'`,
			p.Phase, string(p.Detail), p.MachineID, p.MachineName, id)
	})
}

// UpdatePhase is UpdateOperation of phase and detail.
func (j *Journal) UpdatePhase(ctx context.Context, id, phase string, detail []byte) error {
	return j.UpdateOperation(ctx, id, Progress{Phase: phase, Detail: detail})
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
func (j *Journal) Finish(ctx context.Context, id string, out Outcome) error {
	message := ""
	if out.Err != nil {
		message = database.OneLine(out.Err.Error())
	}
	return j.cfg.DB.Write(ctx, "finish-operation", func(t *database.Tx) error {
		err := t.DoOne(notRunning(id), `UPDATE operations SET state = ?, error_kind = ?, error_message = ?, result = ?, ended_at = ?
			WHERE id = ? AND state = 'running'`,
			out.State, errdefs.KindOf(out.Err), message, database.JSON(out.Result), t.Now.UnixNano(), id)
		if err != nil {
			return err
		}
		if err := t.Do(`DELETE FROM leases WHERE operation_id = ?`, id); err != nil {
			return err
		}
		if err := j.cfg.Ended(t, id); err != nil {
			return err
		}
		return t.Do(`DELETE FROM operations WHERE state <> 'running' AND seq <=
			(SELECT seq FROM operations WHERE state <> 'running' ORDER BY seq DESC LIMIT 1 OFFSET ?)`, j.cfg.Keep)
	})
}

// GetOperation gives the operation of an id; NOT_FOUND if there is none.
func (j *Journal) GetOperation(ctx context.Context, id string) (Operation, error) {
	return database.One(ctx, j.cfg.DB, NotFound(id), scanOperation, selectOperation+`WHERE id = ?`, id)
}

// ListOperations gives the operations of a machine, or of all when the id is
// empty, newest first; ended ones only if ended is true.
func (j *Journal) ListOperations(ctx context.Context, machineID string, ended bool) ([]Operation, error) {
	where := `WHERE state = 'running' AND (?1 = '' OR machine_id = ?1)`
	if ended {
		where = `WHERE ?1 = '' OR machine_id = ?1`
	}
	return database.All(ctx, j.cfg.DB, scanOperation, selectOperation+where+` ORDER BY seq DESC`, machineID)
}

// Unfinished gives the running operations, oldest first: what a starting
// daemon finishes or undoes.
func (j *Journal) Unfinished(ctx context.Context) ([]Operation, error) {
	return database.All(ctx, j.cfg.DB, scanOperation, selectOperation+`WHERE state = 'running' ORDER BY seq`)
}

// NotFound is the error of a reference that no operation answers to.
func NotFound(ref string) error {
	return errdefs.New(errdefs.NotFound, "find operation %q: there is none; see holdpoint operation ls --all", ref)
}

func notRunning(id string) error {
	return errdefs.New(errdefs.WrongState, "record operation %s: it is not running; see holdpoint operation show %s", id, id)
}
