package rows

import (
	"fmt"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
)

// CheckDisk refuses a checkpoint of a machine whose disk could not be restored.
func CheckDisk(t *database.Tx, machineID, name string, k checkpoint.Checkpoint) error {
	chain, err := Chain(t.Ctx, t, machineID)
	if err != nil {
		return err
	}
	if len(chain) == 1 && chain[0].Format == Raw {
		return checkRaw(t, chain[0], k)
	}
	if len(k.Layers) == 0 || len(k.Layers) > len(chain) || k.Full != nil && len(k.Layers) != len(chain)-1 {
		return fmt.Errorf("publish checkpoint %s: it has %d layers, its machine %q %d", k.ID, len(k.Layers), name, len(chain))
	}
	for i, id := range k.Layers {
		if chain[i].ID != id || chain[i].State != LayerSealed {
			return fmt.Errorf("publish checkpoint %s: layer %s is not layer %d of machine %q and sealed", k.ID, id, i, name)
		}
	}
	return nil
}

// checkRaw refuses what is no copy of a raw disk.
func checkRaw(t *database.Tx, disk Layer, k checkpoint.Checkpoint) error {
	if k.Full != nil || len(k.Layers) != 1 {
		return fmt.Errorf("publish checkpoint %s: it has %d layers and is of kind %s; of a raw disk there are disk checkpoints with one", k.ID, len(k.Layers), k.Kind)
	}
	l, err := GetLayer(t.Ctx, t, k.Layers[0])
	if err != nil {
		return err
	}
	if l.ID == disk.ID || l.Format != Raw || l.State != LayerSealed || l.VirtualBytes != disk.VirtualBytes {
		return fmt.Errorf("publish checkpoint %s: layer %s is no sealed copy of the raw disk %s", k.ID, l.ID, disk.ID)
	}
	return nil
}

// Below are those of a checkpoint's layers that a top rests on: all of them, or
// none, because a raw top is a copy of the one there is.
func Below(t *database.Tx, layers []string, top Layer) ([]string, error) {
	for _, id := range layers {
		l, err := GetLayer(t.Ctx, t, id)
		if err != nil {
			return nil, err
		}
		if (l.Format == Raw) != (top.Format == Raw) {
			return nil, fmt.Errorf("record chain: a %s top does not go with layer %s, which is %s", top.Format, l.ID, l.Format)
		}
	}
	if top.Format == Raw {
		return nil, nil
	}
	return layers, nil
}
