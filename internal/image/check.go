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
)

// settled is how old a file's last change must be for its times to tell it
// from a later one: longer than any clock tick of a file system.
const settled = 2 * time.Second

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
		fresh = fresh || read
		if time.Since(time.Unix(0, max(seen.Changed, seen.Modified))) > settled {
			now.Files[a.file] = seen
		}
	}
	if fresh && len(now.Files) > 0 {
		img.writeVerified(now)
	}
	return nil
}

// checkAsset returns how the file looks, and whether it had to be read.
func (img Image) checkAsset(ctx context.Context, a namedAsset, known verified) (looks, bool, error) {
	path := filepath.Join(img.Dir, a.file)
	changed := func(format string, args ...any) error {
		return errdefs.New(errdefs.Storage, "check image %s: %s %w; remove the image and build it again", img.BuildID, path, fmt.Errorf(format, args...))
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return looks{}, false, changed("is missing")
	}
	if err != nil {
		return looks{}, false, changed("cannot be opened: %w", err)
	}
	defer f.Close()
	before, err := lookAt(f)
	if err != nil {
		return looks{}, false, changed("is damaged: %w", err)
	}
	if before.Size != a.Size {
		return looks{}, false, changed("has changed: it has %d bytes and was built with %d", before.Size, a.Size)
	}
	if known.Files[a.file] == before {
		return before, false, nil
	}
	digest := fileDigest
	if a.file == rootFile {
		digest = diskDigest
	}
	sum, err := digest(ctx, f)
	switch {
	case ctx.Err() != nil:
		return looks{}, false, fmt.Errorf("check image %s: %w", img.BuildID, ctx.Err())
	case err != nil:
		return looks{}, false, changed("cannot be read: %w", err)
	case sum != a.SHA256:
		return looks{}, false, changed("has changed since it was built")
	}
	after, err := lookAt(f)
	if err != nil || after != before {
		return looks{}, false, changed("changes while it is read")
	}
	return after, true, nil
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
