package fakedisk

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

func apply(root string, payload []byte) error {
	gz, err := gzip.NewReader(bytes.NewReader(payload))
	if err != nil {
		return err
	}
	tr := tar.NewReader(gz)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if !filepath.IsLocal(h.Name) {
			return fmt.Errorf("entry %q leaves the disk", h.Name)
		}
		if err := applyEntry(filepath.Join(root, strings.TrimSuffix(h.Name, "/")), h, tr); err != nil {
			return fmt.Errorf("unpack %q: %w", h.Name, err)
		}
	}
}

func applyEntry(path string, h *tar.Header, content io.Reader) error {
	old, statErr := os.Lstat(path)
	isDir := h.Typeflag == tar.TypeDir
	if statErr == nil && (h.PAXRecords[removedRecord] != "" || !isDir || !old.IsDir()) {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	if h.PAXRecords[removedRecord] != "" {
		return nil
	}
	mode := fs.FileMode(h.Mode & 0o7777).Perm()
	switch h.Typeflag {
	case tar.TypeDir:
		if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	case tar.TypeSymlink:
		if err := os.Symlink(h.Linkname, path); err != nil {
			return err
		}
	case tar.TypeFifo:
		if err := unix.Mkfifo(path, uint32(mode)); err != nil {
			return err
		}
	case tar.TypeReg:
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, content)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	default:
		return nil
	}
	return applyAttributes(path, h)
}

func applyAttributes(path string, h *tar.Header) error {
	if os.Geteuid() == 0 {
		if err := os.Lchown(path, h.Uid, h.Gid); err != nil {
			return err
		}
	}
	if h.Typeflag == tar.TypeSymlink {
		return nil
	}
	if err := unix.Chmod(path, uint32(h.Mode&0o7777)); err != nil {
		return err
	}
	return os.Chtimes(path, h.ModTime, h.ModTime)
}

// Check refuses a file that is no layer.
func Check(path string) error {
	_, _, err := readLayer(path, false)
	return err
}
