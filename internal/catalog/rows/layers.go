package rows

import (
	"context"
	"database/sql"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// LayerState says how far a layer's life has come.
type LayerState string

// The states of a layer.
const (
	LayerCreated LayerState = "created"
	LayerLive    LayerState = "live"
	LayerSealed  LayerState = "sealed"
)

// The formats of layers: of a disk, of memory, of the state of CPUs and devices.
const (
	Qcow2   = "qcow2"
	Raw     = "raw"
	Memory  = "memory"
	Devices = "devices"
)

// Layer is one file of a disk above the image, or of a full checkpoint.
type Layer struct {
	ID string
	// MachineID is the machine whose run writes or wrote it; empty for a
	// standby's, which is nobody's yet.
	MachineID string
	// Path is relative to the home, slash-separated, and final.
	Path string
	// Format is Qcow2, Raw, Memory or Devices.
	Format string
	// VirtualBytes is the size of the disk or memory it is of.
	VirtualBytes int64
	// StoredBytes is what it takes on the host, as far as measured.
	StoredBytes int64
	State       LayerState
	// Digest is "sha256:…" of a sealed one, empty until computed.
	Digest    string
	CreatedAt time.Time
}

// Measured is what was found out about a layer when it was written.
type Measured struct {
	ID string
	// Bytes is what it takes on the host, Digest "sha256:…" or empty.
	Bytes  int64
	Digest string
}

const layerColumns = `l.id, l.machine_id, l.path, l.format, l.virtual_bytes, l.stored_bytes, l.state, coalesce(l.digest, ''), l.created_at`

func scanLayer(rows *sql.Rows) (Layer, error) {
	var (
		l       Layer
		created int64
	)
	err := rows.Scan(&l.ID, &l.MachineID, &l.Path, &l.Format, &l.VirtualBytes, &l.StoredBytes, &l.State, &l.Digest, &created)
	l.CreatedAt = database.Time(created)
	return l, err
}

// InsertLayer records a new layer; its state is created, whatever l says.
func InsertLayer(t *database.Tx, l Layer) error {
	err := t.Do(`INSERT INTO layers VALUES (?, ?, ?, ?, ?, ?, 'created', NULL, ?)`,
		l.ID, l.MachineID, l.Path, l.Format, l.VirtualBytes, l.StoredBytes, t.OrNow(l.CreatedAt))
	if database.IsUnique(err) {
		return errdefs.New(errdefs.AlreadyExists, "record layer %s at %q: its id or path is recorded already", l.ID, l.Path)
	}
	return err
}

// LeaseLayer leases a layer to an operation, which keeps it until it ends.
func LeaseLayer(t *database.Tx, opID, layerID string) error {
	return t.Do(`INSERT INTO leases VALUES ('layer', ?, ?, 1, ?)
		ON CONFLICT DO UPDATE SET expires_at = max(expires_at, excluded.expires_at)`,
		layerID, opID, t.Now.Add(time.Hour).UnixNano())
}

// GetLayer gives the layer of an id; NOT_FOUND if there is none.
func GetLayer(ctx context.Context, q database.Querier, id string) (Layer, error) {
	return database.One(ctx, q, NoLayer(id), scanLayer, `SELECT `+layerColumns+` FROM layers l WHERE l.id = ?`, id)
}

// NoLayer is the error of an id that no layer has.
func NoLayer(id string) error { return NotFound("layer", id, "holdpoint checkpoint show") }

// Layers gives all layers by path.
func Layers(ctx context.Context, q database.Querier) ([]Layer, error) {
	return database.All(ctx, q, scanLayer, `SELECT `+layerColumns+` FROM layers l ORDER BY l.path`)
}

// Unsigned gives the disk layers of checkpoints whose digests are not known.
func Unsigned(ctx context.Context, q database.Querier) ([]Layer, error) {
	return database.All(ctx, q, scanLayer, `SELECT `+layerColumns+` FROM layers l
		WHERE coalesce(l.digest, '') = '' AND l.id IN (SELECT layer_id FROM checkpoint_layers) ORDER BY l.created_at, l.id`)
}

// SealLayers records that layers are read-only for good.
func SealLayers(t *database.Tx, ids ...string) error {
	for _, id := range ids {
		if err := t.DoOne(NoLayer(id), `UPDATE layers SET state = 'sealed' WHERE id = ?`, id); err != nil {
			return err
		}
	}
	return nil
}

// Measure records what sealed layers take; another one is WRONG_STATE.
func Measure(t *database.Tx, list ...Measured) error {
	for _, l := range list {
		missing := errdefs.New(errdefs.WrongState, "measure layer %s: there is none that is sealed", l.ID)
		err := t.DoOne(missing, `UPDATE layers SET stored_bytes = ?, digest = coalesce(nullif(?, ''), digest)
			WHERE id = ? AND state = 'sealed'`, l.Bytes, l.Digest, l.ID)
		if err != nil {
			return err
		}
	}
	return nil
}

// PushLayer makes a layer the top of a machine's chain.
func PushLayer(t *database.Tx, machineID, layerID string) error {
	return t.Do(`INSERT INTO chains SELECT ?1, coalesce(max(position) + 1, 0), ?2 FROM chains WHERE machine_id = ?1`, machineID, layerID)
}

// Chain gives a machine's live chain, lowest first.
func Chain(ctx context.Context, q database.Querier, machineID string) ([]Layer, error) {
	return database.All(ctx, q, scanLayer, `SELECT `+layerColumns+`
		FROM chains c JOIN layers l ON l.id = c.layer_id WHERE c.machine_id = ? ORDER BY c.position`, machineID)
}

// InChain reports whether a machine's chain has the layer.
func InChain(t *database.Tx, layerID string) (bool, error) {
	list, err := database.All(t.Ctx, t, database.Value[string], `SELECT machine_id FROM chains WHERE layer_id = ?`, layerID)
	return len(list) > 0, err
}

// Displaced gives the chain that an operation displaced, lowest first.
func Displaced(ctx context.Context, q database.Querier, opID string) ([]Layer, error) {
	return database.All(ctx, q, scanLayer, `SELECT `+layerColumns+`
		FROM displaced_layers d JOIN layers l ON l.id = d.layer_id WHERE d.operation_id = ? ORDER BY d.position`, opID)
}

// MachineMemory gives the memory layers of a machine, lowest first.
func MachineMemory(ctx context.Context, q database.Querier, machineID string) ([]Layer, error) {
	return database.All(ctx, q, scanLayer, `SELECT `+layerColumns+`
		FROM machine_memory c JOIN layers l ON l.id = c.layer_id WHERE c.machine_id = ? ORDER BY c.position`, machineID)
}

// SetMachineMemory makes layers, lowest first, the memory of a machine, head the
// full checkpoint they belong to, and file the memory file that is mapped.
// Without layers and with empty names it is a machine that boots.
func SetMachineMemory(t *database.Tx, machineID string, layers []string, head, file string) error {
	if err := t.Do(`DELETE FROM machine_memory WHERE machine_id = ?`, machineID); err != nil {
		return err
	}
	for i, id := range layers {
		if err := t.Do(`INSERT INTO machine_memory VALUES (?, ?, ?)`, machineID, i, id); err != nil {
			return err
		}
	}
	return t.Do(`UPDATE machines SET memory_head = ?, memory_file = ? WHERE id = ?`, head, file, machineID)
}

// ContinueHead gives a machine without a run the memory of its head, whatever
// was recorded of that run's end before. WRONG_STATE: that is no full checkpoint.
func ContinueHead(t *database.Tx, machineID, name, head string) error {
	if head != "" {
		k, err := GetCheckpoint(t.Ctx, t, head)
		if err != nil {
			return err
		}
		if k.Full != nil {
			return SetMachineMemory(t, machineID, k.Full.Memory, k.ID, "")
		}
	}
	return errdefs.New(errdefs.WrongState, "suspend machine %q: its head is no full checkpoint; checkpoint it first", name)
}

// unreferenced is true of a layer that no chain, checkpoint, machine's memory,
// displaced machine, standby or lease (expired ones of running operations
// included) has.
const unreferenced = `NOT EXISTS (SELECT 1 FROM chains WHERE layer_id = l.id)
	AND NOT EXISTS (SELECT 1 FROM checkpoint_layers WHERE layer_id = l.id)
	AND NOT EXISTS (SELECT 1 FROM checkpoint_memory WHERE layer_id = l.id)
	AND NOT EXISTS (SELECT 1 FROM checkpoint_full WHERE devices_layer = l.id)
	AND NOT EXISTS (SELECT 1 FROM machine_memory WHERE layer_id = l.id)
	AND NOT EXISTS (SELECT 1 FROM displaced_layers WHERE layer_id = l.id)
	AND NOT EXISTS (SELECT 1 FROM displaced_memory WHERE layer_id = l.id)
	AND NOT EXISTS (SELECT 1 FROM standbys WHERE layer_id = l.id)
	AND NOT EXISTS (SELECT 1 FROM leases WHERE kind = 'layer' AND resource_id = l.id)`

// Unreferenced gives the layers that nothing needs, oldest first.
func Unreferenced(ctx context.Context, q database.Querier) ([]Layer, error) {
	return database.All(ctx, q, scanLayer, `SELECT `+layerColumns+` FROM layers l
		WHERE `+unreferenced+` ORDER BY l.created_at, l.id`)
}

// DeleteLayer forgets a layer that nothing needs; another one is REFERENCED.
// One that is not there is no error.
func DeleteLayer(t *database.Tx, id string) error {
	if err := t.Do(`DELETE FROM layers AS l WHERE l.id = ? AND `+unreferenced, id); err != nil {
		return err
	}
	left, err := database.All(t.Ctx, t, database.Value[string], `SELECT id FROM layers WHERE id = ?`, id)
	if err == nil && len(left) > 0 {
		err = errdefs.New(errdefs.Referenced, "delete layer %s: a machine, checkpoint or operation needs it", id)
	}
	return err
}
