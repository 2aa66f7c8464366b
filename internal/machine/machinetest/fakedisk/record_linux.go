package fakedisk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
)

// loadRaw finds the end of a raw top, and makes one of other content empty.
func (d *Disk) loadRaw() error {
	_, end, err := readLayer(d.top, true)
	if err != nil || end > 0 {
		d.end = end
		return err
	}
	head := []byte(layerMagic + "0\n")
	d.end = int64(len(head))
	return writeAt(d.top, append(head, make([]byte, 8)...), 0)
}

// Merge makes a layer at path, complete or not at all, of layers that lie on
// each other, lowest first.
func Merge(path string, layers ...string) error {
	tmp := path + ".tmp"
	if err := Create(tmp, 0); err != nil {
		return err
	}
	defer os.Remove(tmp) // a rename has taken it away
	for _, layer := range layers {
		payloads, _, err := readLayer(layer, false)
		for _, payload := range payloads {
			err = errors.Join(err, appendRecord(tmp, payload))
		}
		if err != nil {
			return err
		}
	}
	return os.Rename(tmp, path)
}

// add adds a record to the top.
func (d *Disk) add(payload []byte) error {
	if d.end == 0 {
		return appendRecord(d.top, payload)
	}
	next := record(payload)
	err := writeAt(d.top, append(next, make([]byte, 8)...), d.end)
	if err == nil {
		d.end += int64(len(next))
	}
	return err
}

func record(payload []byte) []byte {
	prefix := binary.BigEndian.AppendUint32(nil, uint32(len(payload)))
	prefix = binary.BigEndian.AppendUint32(prefix, crc32.ChecksumIEEE(payload))
	return append(prefix, payload...)
}

func writeAt(path string, data []byte, at int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("open raw disk: %w", err)
	}
	_, err = f.WriteAt(data, at)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write raw disk %q: %w", path, err)
	}
	return nil
}

func appendRecord(path string, payload []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("open top layer: %w", err)
	}
	_, err = f.Write(record(payload))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write top layer %q: %w", path, err)
	}
	return nil
}
