package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/sparse"
)

// settled is how old a file's last change must be for its times to tell it
// from a later one: many ticks of the clock that file systems stamp with, which
// are 1 to 10 ms.
const settled = 200 * time.Millisecond

// maxVerified is the longest record of a check that is read, in bytes.
const maxVerified = 16 << 10

// verified is the content of verified.json: how the files looked when their
// digests were last found right. It saves reading them again; when it is
// missing, damaged or does not fit they are read.
type verified struct {
	Version int              `json:"version"`
	BuildID string           `json:"build_id"`
	Files   map[string]looks `json:"files"`
}

// looks is what changes whenever a file's content does: nobody but the kernel
// sets a change time.
type looks struct {
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
	Size   int64  `json:"size"`
	// Times are nanoseconds since 1970.
	Modified int64 `json:"modified"`
	Changed  int64 `json:"changed"`
}

// Check finds out whether the kernel, initramfs and root disk are still those
// of the build id; a changed or missing one is STORAGE and named. Files that
// look as they did when they were last read are not read again.
func (img Image) Check(ctx context.Context) error {
	known := img.readVerified()
	now := verified{Version: 1, BuildID: img.BuildID, Files: map[string]looks{}}
	fresh := false
	for _, a := range img.assets() {
		seen, read, err := img.checkAsset(ctx, a, known)
		if err != nil {
			return err
		}
		if read.IsZero() || seen.settled(read) {
			now.Files[a.file] = seen
		}
		fresh = fresh || !read.IsZero()
	}
	if fresh && len(now.Files) > 0 {
		img.writeVerified(now)
	}
	return nil
}

// checkAsset returns how the file looks, and when it began to read it; zero
// when it did not have to.
func (img Image) checkAsset(ctx context.Context, a namedAsset, known verified) (looks, time.Time, error) {
	path := filepath.Join(img.Dir, a.file)
	changed := func(format string, args ...any) error {
		return errdefs.New(errdefs.Storage, "check image %s: %s %w; remove the image and build it again", img.BuildID, path, fmt.Errorf(format, args...))
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return looks{}, time.Time{}, changed("is missing")
	}
	if err != nil {
		return looks{}, time.Time{}, changed("cannot be opened: %w", err)
	}
	defer f.Close()
	// A new link to the file, as a backup makes one, changes how it looks and
	// nothing in it: what looks otherwise after it was read is read again.
	for range readTries {
		seen, begun, stable, err := readAsset(ctx, f, a, known, changed)
		if err != nil && ctx.Err() != nil {
			err = fmt.Errorf("check image %s: %w", img.BuildID, ctx.Err())
		}
		if err != nil || stable {
			return seen, begun, err
		}
	}
	return looks{}, time.Time{}, changed("changes while it is read")
}

// readTries is how often a file is read that changes its looks meanwhile.
const readTries = 3

// readAsset reads the open file unless it is known; stable is whether it looks
// after that as it did before.
func readAsset(ctx context.Context, f *os.File, a namedAsset, known verified, changed func(string, ...any) error) (seen looks, begun time.Time, stable bool, err error) {
	before, err := lookAt(f)
	if err != nil {
		return looks{}, time.Time{}, false, changed("is damaged: %w", err)
	}
	if before.Size != a.Size {
		return looks{}, time.Time{}, false, changed("has changed: it has %d bytes and was built with %d", before.Size, a.Size)
	}
	if known.Files[a.file] == before {
		return before, time.Time{}, true, nil
	}
	begun = time.Now()
	digest := fileDigest
	if a.file == rootFile {
		digest = sparse.Digest
	}
	sum, err := digest(ctx, f)
	if err != nil {
		return looks{}, time.Time{}, false, changed("cannot be read: %w", err)
	}
	if sum != a.SHA256 {
		return looks{}, time.Time{}, false, changed("has changed since it was built")
	}
	after, err := lookAt(f)
	if err != nil {
		return looks{}, time.Time{}, false, changed("cannot be read: %w", err)
	}
	return after, begun, after == before, nil
}

// settled reports whether a change of the file after the moment t would show
// in its looks.
func (l looks) settled(t time.Time) bool {
	return t.Sub(time.Unix(0, max(l.Changed, l.Modified))) > settled
}

func lookAt(f *os.File) (looks, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &stat); err != nil {
		return looks{}, err
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFREG {
		return looks{}, errors.New("it is no regular file")
	}
	return looks{
		Device: stat.Dev, Inode: stat.Ino, Size: stat.Size,
		Modified: stat.Mtim.Nano(), Changed: stat.Ctim.Nano(),
	}, nil
}

func (img Image) readVerified() verified {
	data, err := readSmall(filepath.Join(img.Dir, verifiedFile), maxVerified)
	var v verified
	if err != nil || json.Unmarshal(data, &v) != nil || v.Version != 1 || v.BuildID != img.BuildID {
		return verified{}
	}
	return v
}

// writeVerified remembers a check. Where that is not possible (a full disk)
// the next check takes longer, nothing else.
func (img Image) writeVerified(v verified) {
	if data, err := json.Marshal(v); err == nil {
		var files durable.FS
		_ = files.WriteFile(filepath.Join(img.Dir, verifiedFile), append(data, '\n'), 0o600)
	}
}
