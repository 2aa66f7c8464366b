package image

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/initramfs"
)

// embedded is the folder with the guest agent, if this build has one.
//
//go:embed all:embedded
var embedded embed.FS

// program is the guest agent where it lies: it is read, never copied as a whole.
type program interface {
	io.Reader
	io.ReaderAt
	io.Seeker
}

// BootInitramfs returns the path of the initramfs to boot the image with: the
// image's own part followed by this build's guest agent as /init (the kernel
// unpacks archives one after the other). It is made once for each image and
// agent and kept in cacheDir, so that a new holdpoint boots old images with
// the new agent. It is UNSUPPORTED for a build without an agent.
func (img Image) BootInitramfs(ctx context.Context, cacheDir string) (string, error) {
	agent, err := guestAgent()
	if err != nil {
		return "", err
	}
	path, err := img.bootInitramfs(ctx, cacheDir, agent)
	if err != nil {
		return "", fmt.Errorf("make the initramfs of image %s: %w", img.BuildID, err)
	}
	return path, nil
}

func (img Image) bootInitramfs(ctx context.Context, cacheDir string, agent program) (string, error) {
	h := sha256.New()
	size, err := io.Copy(h, contextReader{ctx, agent})
	if err != nil {
		return "", err
	}
	path := filepath.Join(bootDir(cacheDir), img.BuildID+"-"+hex.EncodeToString(h.Sum(nil)[:8]))
	var rest initramfs.Counter
	rest.W = io.Discard
	if err := initramfs.Init(&rest, strings.NewReader(""), 0); err != nil {
		return "", err
	}
	// The agent's content is padded to 4 bytes in the archive.
	want := img.Initramfs.Size + rest.N + (size+3)&^3
	if info, err := os.Lstat(path); err == nil && info.Mode().IsRegular() && info.Size() == want {
		return path, nil
	}
	own, err := readSmall(filepath.Join(img.Dir, initramfsFile), img.Initramfs.Size)
	if err != nil {
		return "", errdefs.New(errdefs.Storage, "read its own part: %w; remove the image and build it again", err)
	}
	var files durable.FS
	if err := files.MkdirAll(bootDir(cacheDir)); err != nil {
		return "", err
	}
	partial := path + "." + durable.NewID() + partialSuffix
	out, err := files.CreateExclusive(partial, 0o400)
	if err != nil {
		return "", err
	}
	_, err = out.Write(own)
	if err == nil {
		err = initramfs.Init(out, agent, size)
	}
	if err == nil {
		err = out.Sync()
	}
	if closeErr := out.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = files.Rename(partial, path)
	}
	if err != nil {
		return "", errors.Join(err, files.Remove(partial))
	}
	return path, nil
}

// partialSuffix is that of a boot file being written.
const partialSuffix = ".partial"

// guestAgent is the embedded agent.
func guestAgent() (program, error) {
	file, err := embedded.Open("embedded/holdpoint-agent")
	if err != nil {
		return nil, errdefs.New(errdefs.Unsupported, "boot a guest: this build of holdpoint has no guest agent; build it with make")
	}
	agent, ok := file.(program)
	if !ok {
		return nil, fmt.Errorf("read the guest agent: %T cannot be read at an offset", file)
	}
	return agent, nil
}

// bootDir is where boot files are kept, each called by the build id and the
// beginning of the agent's sha256.
func bootDir(cacheDir string) string { return filepath.Join(cacheDir, "boot") }

// removeBootFiles removes what bootInitramfs made of an image.
func removeBootFiles(files *durable.FS, cacheDir, buildID string) error {
	found, err := os.ReadDir(bootDir(cacheDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errdefs.New(errdefs.Storage, "remove the boot files of image %s: %w", buildID, err)
	}
	for _, entry := range found {
		if !strings.HasPrefix(entry.Name(), buildID+"-") {
			continue
		}
		if err := files.Remove(filepath.Join(bootDir(cacheDir), entry.Name())); err != nil {
			return fmt.Errorf("remove the boot files of image %s: %w", buildID, err)
		}
	}
	return nil
}
