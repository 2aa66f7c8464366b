package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const privateMode = 0o700

// Mkdir makes one private folder (0700) and syncs its parent. A folder that
// exists is taken if CheckPrivate allows it.
func (f *FS) Mkdir(path string) error {
	if _, err := os.Lstat(path); err == nil {
		return CheckPrivate(path)
	}
	if err := f.step(Step{Op: OpMkdir, Path: path}); err != nil {
		return err
	}
	err := os.Mkdir(path, privateMode)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return wrap("make folder", path, err)
	}
	if err := CheckPrivate(path); err != nil {
		return err
	}
	if err := f.SyncDir(filepath.Dir(path)); err != nil {
		_ = os.Remove(path) // what an error tells was not made; with something in it, it stays
		return err
	}
	return nil
}

// MkdirAll makes the folder and the missing ones above it, all private. Of the
// folders above that exist, symlinks that are not root's are refused (DENIED):
// whoever owns such a link chooses where our state goes.
func (f *FS) MkdirAll(path string) error {
	path = filepath.Clean(path)
	if _, err := os.Lstat(path); err == nil {
		if err := checkAncestors(path); err != nil {
			return err
		}
		return CheckPrivate(path)
	}
	var missing []string
	for p := path; ; p = filepath.Dir(p) {
		if _, err := os.Lstat(p); err == nil || p == filepath.Dir(p) {
			break
		} else if !errors.Is(err, fs.ErrNotExist) {
			return wrap("make folder", path, err)
		}
		missing = append(missing, p)
	}
	if err := checkAncestors(path); err != nil {
		return err
	}
	for i := len(missing) - 1; i >= 0; i-- {
		if err := f.Mkdir(missing[i]); err != nil {
			return err
		}
	}
	return nil
}

// CheckPrivate refuses a folder that is not ours alone: a symlink, another
// owner's, or one that group or others may enter (DENIED).
func CheckPrivate(path string) error {
	st, err := os.Lstat(path)
	if err != nil {
		return wrap("check folder", path, err)
	}
	switch uid, known := owner(st); {
	case st.Mode()&fs.ModeSymlink != 0:
		return errdefs.New(errdefs.Denied, "use folder %q: it is a symlink; use the folder it leads to", path)
	case !st.IsDir():
		return errdefs.New(errdefs.Denied, "use folder %q: it is not a folder; move it away", path)
	case known && uid != os.Geteuid():
		return errdefs.New(errdefs.Denied, "use folder %q: it belongs to user %d; choose a folder of your own", path, uid)
	case known && st.Mode().Perm()&0o077 != 0:
		return errdefs.New(errdefs.Denied, "use folder %q: others may enter it (mode %04o); run chmod 700 on it", path, st.Mode().Perm())
	}
	return nil
}

func checkAncestors(path string) error {
	for p := filepath.Dir(path); p != filepath.Dir(p); p = filepath.Dir(p) {
		st, err := os.Lstat(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return wrap("check folder", p, err)
		}
		uid, known := owner(st)
		if st.Mode()&fs.ModeSymlink != 0 && known && uid != 0 {
			return errdefs.New(errdefs.Denied, "use folder %q: %q above it is a symlink; use the folder it leads to", path, p)
		}
	}
	return nil
}
