package image

import (
	"bytes"
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
		"pvpanic", "pvpanic-mmio", // or a panic looks like a reset
		"inet_diag", "tcp_diag", // with them the agent ends connections after a restore
	}
}

// moduleKey is a module's name as the kernel knows it: file names use - and _
// for the same thing.
func moduleKey(name string) string { return strings.ReplaceAll(name, "-", "_") }

// module is a kernel module for the initramfs: an uncompressed file NAME.ko.
type module struct {
	name string
	data []byte
}

// inOrder are the boot modules among those found, by moduleKey, in the order in
// which they load; the others are built into the kernel, scanTree made sure.
func inOrder(found map[string][]byte) []module {
	var modules []module
	for _, name := range bootModules() {
		if data, ok := found[moduleKey(name)]; ok {
			modules = append(modules, module{name, data})
		}
	}
	return modules
}

// encodeInitramfs makes the image's part of the initramfs: below /holdpoint
// the modules, and in /holdpoint/modules their absolute paths, one a line, in
// the order in which they load. The archive is not compressed: of a few hundred
// KiB that saves nothing, and a boot is no slower.
func encodeInitramfs(modules []module) ([]byte, error) {
	records := []cpio.Record{cpio.Directory("holdpoint", 0o755)}
	var order strings.Builder
	for _, m := range modules {
		path := "holdpoint/" + m.name + ".ko"
		records = append(records, cpio.StaticFile(path, string(m.data), 0o644))
		fmt.Fprintf(&order, "/%s\n", path)
	}
	records = append(records, cpio.StaticFile("holdpoint/modules", order.String(), 0o644))
	var archive bytes.Buffer
	if err := writeArchive(&archive, records); err != nil {
		return nil, err
	}
	return archive.Bytes(), nil
}

// program is the guest agent where it lies: it is read, never copied as a whole.
type program interface {
	io.Reader
	io.ReaderAt
	io.Seeker
}

// writeInit writes the other part of the initramfs: the agent as /init, and
// the folders and console it wants before it has mounted anything.
func writeInit(w io.Writer, agent io.ReaderAt, size int64) error {
	init := cpio.StaticFile("init", "", 0o755)
	init.ReaderAt, init.FileSize = agent, uint64(size)
	return writeArchive(w, []cpio.Record{
		cpio.Directory("dev", 0o755),
		cpio.CharDev("dev/console", 0o600, 5, 1),
		cpio.Directory("proc", 0o755),
		cpio.Directory("sys", 0o755),
		init,
	})
}

// writeArchive writes a cpio archive whose length is a multiple of 4 bytes, as
// the kernel wants it for the next one to follow
// (Documentation/driver-api/early-userspace/buffer-format.rst).
func writeArchive(w io.Writer, records []cpio.Record) error {
	counted := &lengthWriter{w: w}
	archive := cpio.Newc.Writer(counted)
	for i, r := range records {
		r.Ino, r.NLink = uint64(i+1), 1
		if err := archive.WriteRecord(r); err != nil {
			return fmt.Errorf("write %s into the initramfs: %w", r.Name, err)
		}
	}
	if err := cpio.WriteTrailer(archive); err != nil {
		return fmt.Errorf("end the initramfs: %w", err)
	}
	_, err := w.Write(make([]byte, -counted.n&3))
	return err
}

// lengthWriter counts what it writes.
type lengthWriter struct {
	w io.Writer
	n int64
}

// Write implements io.Writer.
func (l *lengthWriter) Write(p []byte) (int, error) {
	n, err := l.w.Write(p)
	l.n += int64(n)
	return n, err
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
	var rest lengthWriter
	rest.w = io.Discard
	if err := writeInit(&rest, strings.NewReader(""), 0); err != nil {
		return "", err
	}
	// The agent's content is padded to 4 bytes in the archive.
	want := img.Initramfs.Size + rest.n + (size+3)&^3
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
		err = writeInit(out, agent, size)
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
