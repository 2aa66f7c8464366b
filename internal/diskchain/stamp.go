package diskchain

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// stamp is what a merged file was when it was made. It is in a file of its own
// beside it, written last: a file without, or one that has changed since, is not
// used. That costs no reading at each start; Check reads it all.
type stamp struct {
	Version int   `json:"version"`
	Bytes   int64 `json:"bytes"`
	Changed int64 `json:"changed_unix_nano"`
	// Digest is that of disk.Digest.
	Digest string `json:"digest"`
}

const stampVersion = 2

// stampOf is where the stamp of a merged file is.
func stampOf(path string) string { return strings.TrimSuffix(path, mergedSuffix) + ".json" }

// stamp notes what the file is now.
func (f file) stamp(ctx context.Context, files *durable.FS) error {
	info, err := os.Lstat(f.Path)
	if err != nil {
		return errdefs.New(errdefs.Storage, "stamp merged disk: %w", err)
	}
	digest, _, err := disk.Digest(ctx, f.Path)
	if err != nil {
		return fmt.Errorf("stamp merged disk %q: %w", f.Path, err)
	}
	b, err := json.Marshal(stamp{stampVersion, info.Size(), info.ModTime().UnixNano(), digest})
	if err != nil {
		return err
	}
	return files.WriteFile(stampOf(f.Path), append(b, '\n'), 0o600)
}

// stamped is what was noted of the file.
func (f file) stamped() (s stamp, ok bool) {
	b, err := os.ReadFile(stampOf(f.Path))
	return s, err == nil && json.Unmarshal(b, &s) == nil && s.Version == stampVersion
}

// sound reports whether the file is there and was not touched since it was made.
func (f file) sound() bool {
	s, ok := f.stamped()
	info, err := os.Lstat(f.Path)
	return ok && err == nil && info.Mode().IsRegular() && info.Size() == s.Bytes && info.ModTime().UnixNano() == s.Changed
}

// check reports whether the file still has the bytes that it was made with.
func (f file) check(ctx context.Context) (bool, error) {
	s, ok := f.stamped()
	if !ok {
		return false, nil
	}
	digest, _, err := disk.Digest(ctx, f.Path)
	if err != nil {
		return false, fmt.Errorf("check merged disk %q: %w", f.Path, err)
	}
	return digest == s.Digest, nil
}
