// Package initramfs writes the two archives that a guest boots with: an image's
// kernel modules, and the guest agent as /init. It reads none and finds no
// modules.
package initramfs

import (
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/holdpoint/holdpoint/internal/image/kernel"
)

// Modules makes the image's part of the initramfs: below /holdpoint the modules,
// and in /holdpoint/modules their absolute paths, one a line, in the order in
// which they load. The archive is not compressed: of a few hundred KiB that
// saves nothing, and a boot is no slower.
func Modules(modules []kernel.Module) ([]byte, error) {
	records := []cpio.Record{cpio.Directory("holdpoint", 0o755)}
	var order strings.Builder
	for _, m := range modules {
		path := "holdpoint/" + m.Name + ".ko"
		records = append(records, cpio.StaticFile(path, string(m.Data), 0o644))
		fmt.Fprintf(&order, "/%s\n", path)
	}
	records = append(records, cpio.StaticFile("holdpoint/modules", order.String(), 0o644))
	var archive bytes.Buffer
	if err := writeArchive(&archive, records); err != nil {
		return nil, err
	}
	return archive.Bytes(), nil
}

// Init writes the other part of the initramfs: the agent, size bytes, as /init,
// and the folders and console it wants before it has mounted anything.
func Init(w io.Writer, agent io.ReaderAt, size int64) error {
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
	counted := &Counter{W: w}
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
	_, err := w.Write(make([]byte, -counted.N&3))
	return err
}

// Counter counts in N the bytes that it writes to W.
type Counter struct {
	W io.Writer
	N int64
}

// Write implements io.Writer.
func (l *Counter) Write(p []byte) (int, error) {
	n, err := l.W.Write(p)
	l.N += int64(n)
	return n, err
}
