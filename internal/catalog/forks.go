package catalog

import (
	"context"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/rows"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// CreateFork records a machine that begins from a checkpoint of another one or
// from an image's booted one: its chain is the checkpoint's layers and top,
// which exists and may have been staged by AddLayer or be that of a standby. Of
// a full checkpoint it has the memory, too: begin its run by BeginIncoming, or
// by BeginRun to boot it. Its state is creating. Its head is the checkpoint, but
// for an image's booted one, which is nobody's head. A taken name is ALREADY_EXISTS.
func (c *Catalog) CreateFork(ctx context.Context, m Machine, checkpointID string, top Layer) error {
	return c.db.Write(ctx, "create-fork", func(t *database.Tx) error {
		ck, err := rows.GetCheckpoint(ctx, t, checkpointID)
		if err != nil {
			return err
		}
		m.State, m.ImageBuildID, m.ForkedFrom = machine.Creating, ck.ImageBuildID, ck.ID
		head := ck.ID
		if ck.MachineID == "" {
			m.ForkedFrom, head = "", ""
		}
		if err := insertMachine(t, m); err != nil {
			return err
		}
		if err := installChain(t, m.ID, ck.Layers, top); err != nil {
			return err
		}
		if err := installMemory(t, m, ck, ck.Full != nil); err != nil {
			return err
		}
		return t.Do(`UPDATE machines SET head_checkpoint = nullif(?, '') WHERE id = ?`, head, m.ID)
	})
}

// BeginIncoming records that a run of a suspended machine, or of a new one that
// CreateFork has made, is about to continue its memory: what is below the top of
// its chain is sealed from now on, the top is live, and the run maps the memory
// file of the machine's top memory layer. The top must not have been written
// since the checkpoint; where it may have been, use ReplaceChain with a new one.
// A machine in another state, or without memory, is WRONG_STATE.
func (c *Catalog) BeginIncoming(ctx context.Context, id, runID string) error {
	return c.db.Write(ctx, "begin-incoming", func(t *database.Tx) error {
		m, err := machineOf(t, id)
		if err != nil {
			return err
		}
		chain, err := rows.MachineMemory(ctx, t, id)
		if err != nil {
			return err
		}
		if m.State != machine.Suspended && m.State != machine.Creating || len(chain) == 0 {
			return errdefs.New(errdefs.WrongState, "continue machine %q: it is %s and has %d memory layers to go on from; only a suspended machine or a new fork can",
				m.Name, m.State, len(chain))
		}
		if err := wakeTop(t, m); err != nil {
			return err
		}
		return t.Do(`UPDATE machines SET run_id = ?, exit = '', memory_file = ? WHERE id = ?`, runID, chain[len(chain)-1].ID, id)
	})
}
