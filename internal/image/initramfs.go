package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// embedded is the folder with the guest agent, if this build has one.
//
//go:embed all:embedded
var embedded embed.FS

// bootModules are the kernel modules that a guest needs before it has a root
// disk, in the order in which they load: each after those it depends on.
// Debian's cloud kernel has ext4 and PCI built in, virtio as modules.
func bootModules() []string {
	return []string{
		"virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci",
		"virtio_blk", "virtio_console", "virtio-rng", "failover", "net_failover", "virtio_net",
	}
}

// moduleKey is a module's name as the kernel knows it: file names use - and _
// for the same thing.
func moduleKey(name string) string { return strings.ReplaceAll(name, "-", "_") }

// encodeInitramfs makes the image's part of the initramfs: below /holdpoint
// the modules, and in /holdpoint/modules their absolute paths, one a line, in
// the order in which they load. The archive is not compressed: of a few hundred
// KiB that saves nothing, and a boot is no slower.
func encodeInitramfs(modules map[string][]byte) ([]byte, error) {
	records := []cpio.Record{cpio.Directory("holdpoint", 0o755)}
	var order strings.Builder
	for _, name := range bootModules() {
		data, ok := modules[moduleKey(name)]
		if !ok {
			continue // built into the kernel; scanTree made sure
		}
		path := "holdpoint/" + name + ".ko"
		records = append(records, cpio.StaticFile(path, string(data), 0o644))
		fmt.Fprintf(&order, "/%s\n", path)
	}
	records = append(records, cpio.StaticFile("holdpoint/modules", order.String(), 0o644))
	return encodeArchive(records)
}

// encodeInit makes the other part of the initramfs: the agent as /init, and
// the folders and console it wants before it has mounted anything.
func encodeInit(agent []byte) ([]byte, error) {
	return encodeArchive([]cpio.Record{
		cpio.Directory("dev", 0o755),
		cpio.CharDev("dev/console", 0o600, 5, 1),
		cpio.Directory("proc", 0o755),
		cpio.Directory("sys", 0o755),
		cpio.StaticFile("init", string(agent), 0o755),
	})
}

func encodeArchive(records []cpio.Record) ([]byte, error) {
	var buf bytes.Buffer
	w := cpio.Newc.Writer(&buf)
	for i, r := range records {
		r.Ino, r.NLink = uint64(i+1), 1
		if err := w.WriteRecord(r); err != nil {
			return nil, fmt.Errorf("write %s into the initramfs: %w", r.Name, err)
		}
	}
	if err := cpio.WriteTrailer(w); err != nil {
		return nil, fmt.Errorf("end the initramfs: %w", err)
	}
	// The kernel wants the next archive at a multiple of 4 bytes
	// (Documentation/driver-api/early-userspace/buffer-format.rst).
	for buf.Len()%4 != 0 {
		buf.WriteByte(0)
	}
	return buf.Bytes(), nil
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
	return img.bootInitramfs(ctx, cacheDir, agent)
}

func (img Image) bootInitramfs(ctx context.Context, cacheDir string, agent []byte) (string, error) {
	sum := sha256.Sum256(agent)
	path := filepath.Join(bootDir(cacheDir), img.BuildID+"-"+hex.EncodeToString(sum[:8]))
	init, err := encodeInit(agent)
	if err != nil {
		return "", err
	}
	want := img.Initramfs.Size + int64(len(init))
	if info, err := os.Lstat(path); err == nil && info.Mode().IsRegular() && info.Size() == want {
		return path, nil
	}
	if err := ctx.Err(); err != nil {
		return "", fmt.Errorf("make the initramfs of image %s: %w", img.BuildID, err)
	}
	own, err := readSmall(filepath.Join(img.Dir, initramfsFile), img.Initramfs.Size)
	if err != nil {
		return "", errdefs.New(errdefs.Storage, "read the initramfs of image %s: %w; remove the image and build it again", img.BuildID, err)
	}
	var files durable.FS
	if err := files.MkdirAll(bootDir(cacheDir)); err != nil {
		return "", fmt.Errorf("make the initramfs of image %s: %w", img.BuildID, err)
	}
	if err := files.WriteFile(path, append(own, init...), 0o400); err != nil {
		return "", fmt.Errorf("make the initramfs of image %s: %w", img.BuildID, err)
	}
	return path, nil
}

// guestAgent is the embedded agent.
func guestAgent() ([]byte, error) {
	agent, err := embedded.ReadFile("embedded/holdpoint-agent")
	if err != nil {
		return nil, errdefs.New(errdefs.Unsupported, "boot a guest: this build of holdpoint has no guest agent; build it with make")
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
