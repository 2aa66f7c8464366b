package recipe

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// cleanTimeout is how long cleaning up behind a build may take.
const cleanTimeout = time.Minute

// workPrefix begins the names of the store's work folders, so that sweeping
// one store leaves another's builds alone.
func (s Store) workPrefix() string {
	sum := sha256.Sum256([]byte(s.Dir))
	return "holdpoint-build-" + hex.EncodeToString(sum[:4]) + "-"
}

// makeWork makes a work folder that others may pass through but not list.
func (s Store) makeWork() (string, error) {
	if err := checkPassable(s.TempDir); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(s.TempDir, s.workPrefix())
	if err != nil {
		return "", errdefs.New(errdefs.Storage, "make a work folder: %w", err)
	}
	if err := os.Chmod(work, 0o711); err != nil {
		return "", errors.Join(errdefs.New(errdefs.Storage, "open the work folder: %w", err), os.Remove(work))
	}
	return work, nil
}

// checkPassable refuses a folder on whose path others may not pass through.
func checkPassable(dir string) error {
	for path := dir; ; path = filepath.Dir(path) {
		info, err := os.Stat(path)
		if err != nil {
			return errdefs.New(errdefs.Storage, "find the folder for temporary files: %w", err)
		}
		if !info.IsDir() || info.Mode().Perm()&0o001 == 0 {
			return errdefs.New(errdefs.Invalid, "temporary files in %s: others may not pass through %s; choose another folder or run chmod o+x %s", dir, path, path)
		}
		if path == filepath.Dir(path) {
			return nil
		}
	}
}

// removeWork removes a work folder with all in it. What an ordinary user's
// build left belongs to that user's subordinate ids: only the namespace in
// which it was made can remove it.
func removeWork(ctx context.Context, work string) error {
	err := os.RemoveAll(work)
	if err == nil || os.Geteuid() == 0 || errors.Is(err, fs.ErrNotExist) {
		return storage("remove work folder %s: %w", work, err)
	}
	entries, err := os.ReadDir(work)
	if err != nil {
		return storage("remove work folder %s: %w", work, err)
	}
	args := []string{"mmdebstrap", "--unshare-helper", "rm", "-rf", "--one-file-system", "--"}
	for _, entry := range entries {
		args = append(args, filepath.Join(work, entry.Name()))
	}
	// It fails on the last step, the entries themselves, which are in a folder
	// of ours and, empty now, for us to remove.
	_ = Command{Args: args}.Run(ctx)
	return storage("remove work folder %s: %w", work, os.RemoveAll(work))
}

func storage(format, what string, err error) error {
	if err == nil {
		return nil
	}
	return errdefs.New(errdefs.Storage, format, what, err)
}

// owned reports whether path is a folder of this user's.
func owned(path string) bool {
	info, err := os.Lstat(path)
	if err != nil || !info.IsDir() {
		return false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(stat.Uid) == os.Geteuid()
}

// globQuote makes dir a pattern that matches only itself.
func globQuote(dir string) string {
	var quoted []rune
	for _, r := range dir {
		switch r {
		case '*', '?', '[', '\\':
			quoted = append(quoted, '\\')
		}
		quoted = append(quoted, r)
	}
	return string(quoted)
}
