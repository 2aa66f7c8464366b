// Package fakememory is the memory of the fake hypervisor's guests: the content
// of their memory file systems, and what their agent knows, as an image that
// begins at the guest's address 0. It is for tests; a guest's processes are not
// in it.
package fakememory

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// PageSize is the size of a page in bytes, that of package dirty.
const PageSize = 4096

// An image is, in whole pages and big endian:
//
//	"holdpoint fake memory 1\n" uint64 length of the image
//	uint64 length of the table, uint64 Kept.Ran in nanoseconds
//	SHA-256 of the image but for itself and what follows it in this page
//	the table: JSON of type table
//	{ content of a file }*
//
// The table and each content begin on a page. What is the same is in the same
// bytes: files have no times in it. The first page changes while the guest
// runs, as pages of a real idle guest do.
const (
	imageMagic = "holdpoint fake memory 1\n"
	digestAt   = len(imageMagic) + 24
	maxImage   = 1 << 30
)

// Kept is what the guest's agent knows.
type Kept struct {
	// BootID is the guest's boot id.
	BootID string
	// Cmdline is the kernel command line that the guest was booted with.
	Cmdline string
	// Configured is the marshaled ConfigureRequest that it was told last; empty
	// before.
	Configured []byte
	// Paths are the memory file systems, relative to the guest's root.
	Paths []string
	// Ran is how long the guest has run.
	Ran time.Duration `json:"-"`
}

type table struct {
	Kept  Kept
	Files []file
}

// file is one entry below a memory file system.
type file struct {
	Name     string
	Mode     fs.FileMode
	UID, GID int
	Link     string `json:",omitempty"`
	// Offset and Size say where a regular file's content is in the image.
	Offset, Size int64 `json:",omitempty"`
}

// Encode makes the image of a guest whose root is the folder root. It may run
// meanwhile: then each file is as it was at some moment.
func Encode(root string, kept Kept) ([]byte, error) {
	t := table{Kept: kept}
	var contents [][]byte
	seen := map[string]bool{}
	for _, path := range kept.Paths {
		err := filepath.WalkDir(filepath.Join(root, path), func(name string, _ fs.DirEntry, err error) error {
			if err == nil && !seen[name] {
				seen[name] = true
				err = t.add(root, name, &contents)
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil // gone since it was listed
			}
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("read memory of fake guest: %w", err)
		}
	}
	return t.encode(contents)
}

// add notes one file; contents get its content.
func (t *table) add(root, name string, contents *[][]byte) error {
	info, err := os.Lstat(name)
	if err != nil {
		return err
	}
	rel, err := filepath.Rel(root, name)
	if err != nil {
		return err
	}
	f := file{Name: rel, Mode: info.Mode()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		f.UID, f.GID = int(st.Uid), int(st.Gid)
	}
	var content []byte
	switch f.Mode.Type() {
	case 0:
		content, err = os.ReadFile(name)
	case fs.ModeSymlink:
		f.Link, err = os.Readlink(name)
	case fs.ModeDir, fs.ModeNamedPipe:
	default:
		return nil // sockets belong to processes, devices to the kernel
	}
	if err != nil {
		return err
	}
	f.Size = int64(len(content))
	t.Files, *contents = append(t.Files, f), append(*contents, content)
	return nil
}

func (t *table) encode(contents [][]byte) ([]byte, error) {
	// Offsets count from the end of the table, whose length they would change.
	at := int64(0)
	for i, content := range contents {
		if len(content) > 0 {
			t.Files[i].Offset = at
			at += pages(len(content))
		}
	}
	text, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	length := PageSize + pages(len(text)) + at
	if length > maxImage {
		return nil, fmt.Errorf("memory of fake guest: %d bytes are more than it takes", length)
	}
	image := make([]byte, length)
	head := binary.BigEndian.AppendUint64([]byte(imageMagic), uint64(length))
	head = binary.BigEndian.AppendUint64(head, uint64(len(text)))
	copy(image, binary.BigEndian.AppendUint64(head, uint64(t.Kept.Ran)))
	copy(image[PageSize:], text)
	for i, content := range contents {
		copy(image[PageSize+pages(len(text))+t.Files[i].Offset:], content)
	}
	copy(image[digestAt:], digest(image))
	return image, nil
}

// digest is that of an image.
func digest(image []byte) []byte {
	sum := sha256.New()
	sum.Write(image[:digestAt])
	sum.Write(image[PageSize:])
	return sum.Sum(nil)
}

// pages is n rounded up to whole pages.
func pages(n int) int64 { return (int64(n) + PageSize - 1) / PageSize * PageSize }

// Image is an image that was read.
type Image struct {
	table
	// Bytes are all of it.
	Bytes []byte
	files []byte
}

// Decode reads the image that begins a memory file. The file is not written,
// and what follows the image in it must be zeros.
func Decode(f *os.File) (Image, error) {
	head := make([]byte, PageSize)
	if _, err := f.ReadAt(head, 0); err != nil {
		return Image{}, fmt.Errorf("read memory of fake guest: %w", err)
	}
	if !bytes.HasPrefix(head, []byte(imageMagic)) {
		return Image{}, errors.New("read memory of fake guest: it is none")
	}
	length := binary.BigEndian.Uint64(head[len(imageMagic):])
	tableLength := binary.BigEndian.Uint64(head[len(imageMagic)+8:])
	if length > maxImage || length%PageSize != 0 || tableLength > length-PageSize {
		return Image{}, errors.New("read memory of fake guest: its length is wrong")
	}
	i := Image{Bytes: make([]byte, length)}
	if _, err := f.ReadAt(i.Bytes, 0); err != nil {
		return Image{}, fmt.Errorf("read memory of fake guest: %w", err)
	}
	if !bytes.Equal(digest(i.Bytes), head[digestAt:digestAt+sha256.Size]) {
		return Image{}, errors.New("read memory of fake guest: its pages are not of one instant")
	}
	if err := json.Unmarshal(i.Bytes[PageSize:PageSize+tableLength], &i.table); err != nil {
		return Image{}, fmt.Errorf("read memory of fake guest: %w", err)
	}
	i.table.Kept.Ran = time.Duration(binary.BigEndian.Uint64(head[len(imageMagic)+16:]))
	i.files = i.Bytes[PageSize+pages(int(tableLength)):]
	return i, zerosFrom(f, int64(length))
}

// Kept is what the guest's agent knew.
func (i Image) Kept() Kept { return i.table.Kept }

// zerosFrom checks that the file holds nothing but zeros from offset on.
func zerosFrom(f *os.File, offset int64) error {
	buf := make([]byte, 1<<20)
	for {
		data, err := unix.Seek(int(f.Fd()), offset, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // holes up to the end
		} else if err != nil {
			return fmt.Errorf("read memory of fake guest: %w", err)
		}
		n, err := f.ReadAt(buf, data)
		if rest := bytes.TrimLeft(buf[:n], "\x00"); len(rest) > 0 {
			return fmt.Errorf("read memory of fake guest: there is something at %#x, where it had nothing", data+int64(n-len(rest)))
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("read memory of fake guest: %w", err)
		}
		offset = data + int64(n)
	}
}

// Restore makes the memory file systems below root what they were.
func (i Image) Restore(root string) error {
	for _, path := range i.table.Kept.Paths {
		if !filepath.IsLocal(path) {
			return fmt.Errorf("restore memory of fake guest: path %q leaves its root", path)
		}
		if err := os.RemoveAll(filepath.Join(root, path)); err != nil {
			return fmt.Errorf("restore memory of fake guest: %w", err)
		}
	}
	for _, f := range i.Files {
		if err := i.restore(root, f); err != nil {
			return fmt.Errorf("restore memory of fake guest: %w", err)
		}
	}
	return nil
}

func (i Image) restore(root string, f file) error {
	if !filepath.IsLocal(f.Name) || f.Offset < 0 || f.Size < 0 || f.Size > 0 && f.Offset+f.Size > int64(len(i.files)) {
		return fmt.Errorf("entry %q is damaged", f.Name)
	}
	name := filepath.Join(root, f.Name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	var err error
	switch f.Mode.Type() {
	case 0:
		err = os.WriteFile(name, i.files[f.Offset:f.Offset+f.Size], 0o600)
	case fs.ModeSymlink:
		err = os.Symlink(f.Link, name)
	case fs.ModeDir:
		if err = os.Mkdir(name, 0o755); errors.Is(err, fs.ErrExist) {
			err = nil // one memory file system in another
		}
	case fs.ModeNamedPipe:
		err = unix.Mkfifo(name, 0o600)
	}
	if err != nil {
		return err
	}
	if os.Geteuid() == 0 {
		err = os.Lchown(name, f.UID, f.GID)
	}
	if err == nil && f.Mode.Type() != fs.ModeSymlink {
		err = os.Chmod(name, f.Mode)
	}
	return err
}
