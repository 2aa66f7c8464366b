package durable

import (
	"errors"
	"io/fs"
	"os"
)

// RenameUnsynced is Rename without waiting for the disk, for what can be made
// again: after a power cut the file may have either name, or both content and
// name may be lost.
func (f *FS) RenameUnsynced(old, new string) error {
	if err := f.step(Step{Op: OpRename, Path: old, To: new}); err != nil {
		return err
	}
	if err := os.Rename(old, new); err != nil {
		return wrap("rename", old, err)
	}
	return nil
}

// RemoveUnsynced is Remove without waiting for the disk: after a power cut the
// file may be there again.
func (f *FS) RemoveUnsynced(path string) error {
	if err := f.step(Step{Op: OpRemove, Path: path}); err != nil {
		return err
	}
	err := os.Remove(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return wrap("remove", path, err)
	}
	return nil
}
