package durable

import (
	"errors"
	"io/fs"
	"os"
)

// File is a new file of ours, open for writing. Its life: CreateExclusive
// makes it, Write and Sync fill it, Close ends it, FS.SyncDir of its folder
// makes its name durable.
type File struct {
	fs *FS
	f  *os.File
}

// CreateExclusive creates path, which must not exist; ALREADY_EXISTS if it
// does. A symlink counts as existing and is not followed.
func (f *FS) CreateExclusive(path string, perm fs.FileMode) (*File, error) {
	if err := f.step(Step{Op: OpCreate, Path: path}); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|noFollow, perm)
	if err != nil {
		return nil, wrap("create", path, err)
	}
	return &File{fs: f, f: file}, nil
}

// Write appends p at the file's offset.
func (f *File) Write(p []byte) (int, error) {
	if err := f.fs.step(Step{Op: OpWrite, Path: f.f.Name(), Bytes: int64(len(p))}); err != nil {
		return 0, err
	}
	n, err := f.f.Write(p)
	if err != nil {
		return n, wrap("write", f.f.Name(), err)
	}
	return n, nil
}

// Sync makes the content durable.
func (f *File) Sync() error {
	if err := f.fs.step(Step{Op: OpSync, Path: f.f.Name()}); err != nil {
		return err
	}
	if err := f.f.Sync(); err != nil {
		return wrap("sync", f.f.Name(), err)
	}
	return nil
}

// Close closes the file; closing it twice is allowed.
func (f *File) Close() error {
	err := f.f.Close()
	if err != nil && !errors.Is(err, os.ErrClosed) {
		return wrap("close", f.f.Name(), err)
	}
	return nil
}

// OS is the file itself, for clones, sparse copies and truncation. What is
// written through it is no step.
func (f *File) OS() *os.File { return f.f }

// discard removes the temporary file of a write that failed. Its own failure
// says nothing new: RemoveTemps sweeps what is left.
func (f *FS) discard(path string) {
	if f.step(Step{Op: OpRemove, Path: path}) == nil {
		_ = os.Remove(path)
	}
}
