// Package fakedisk is the disk of the fake hypervisor: a chain of layers, each
// of which is what changed in a folder since the layers below. It is for tests
// and knows nothing of qcow2.
package fakedisk

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

// A layer of a fake disk is a log of differences:
//
//	"holdpoint fake layer 1 VIRTUALBYTES\n"
//	{ uint32 length, uint32 crc32 of payload, payload }*   big endian
//
// A payload is a gzipped tar of files that changed; a removed one is an empty
// entry with the PAX record below. A torn last record is what a power cut
// leaves, and is ignored. A bottom layer of another content (a real root disk,
// an empty file) is an empty disk. A raw disk is one layer, with zeros from the
// end of its records up to its size.
const (
	layerMagic    = "holdpoint fake layer 1 "
	removedRecord = "HOLDPOINT.removed"
	maxRecord     = 1 << 30
)

// Create makes an empty overlay of a fake disk at path (0600, synced).
// It is what the fake has instead of qemu-img.
func Create(path string, virtualBytes int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("create fake layer: %w", err)
	}
	_, err = fmt.Fprintf(f, "%s%d\n", layerMagic, virtualBytes)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		os.Remove(path)
		return fmt.Errorf("create fake layer %q: %w", path, err)
	}
	return nil
}

// WriteImage makes a bottom layer at path that holds the files of dir.
func WriteImage(path, dir string, virtualBytes int64) error {
	if err := Create(path, virtualBytes); err != nil {
		return err
	}
	d := &Disk{Root: dir, top: path}
	return d.Sync()
}

// readLayer returns the payloads of the layer's whole records and the length
// of the part of the file that holds them.
func readLayer(path string, bottom bool) (payloads [][]byte, end int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, fmt.Errorf("open layer: %w", err)
	}
	defer f.Close()
	r := bufio.NewReader(f)
	head := make([]byte, len(layerMagic))
	if _, err := io.ReadFull(r, head); err != nil || string(head) != layerMagic {
		if bottom {
			return nil, 0, nil
		}
		return nil, 0, fmt.Errorf("open layer %q: not a fake layer", path)
	}
	rest, err := r.ReadString('\n')
	if err != nil {
		return nil, 0, fmt.Errorf("open layer %q: %w", path, err)
	}
	end = int64(len(layerMagic) + len(rest))
	for {
		var prefix [8]byte
		if _, err := io.ReadFull(r, prefix[:]); err != nil {
			return payloads, end, nil
		}
		n := binary.BigEndian.Uint32(prefix[:])
		if n == 0 || n > maxRecord { // zeros follow in an image made longer
			return payloads, end, nil
		}
		payload := make([]byte, n)
		if _, err := io.ReadFull(r, payload); err != nil ||
			crc32.ChecksumIEEE(payload) != binary.BigEndian.Uint32(prefix[4:]) {
			return payloads, end, nil
		}
		payloads = append(payloads, payload)
		end += 8 + int64(n)
	}
}

// Disk is a chain of layers seen as a folder. It is not safe for
// concurrent use.
type Disk struct {
	// Root is the folder; its parent exists.
	Root string
	// Memory are paths relative to Root that are memory file systems: what is
	// in them is in no layer.
	Memory []string
	// top is the layer that takes the differences.
	top string
	// end is where a raw top takes the next one; 0 of any other top.
	end   int64
	known map[string]fileStamp
}

// fileStamp tells whether a file changed since it was last recorded.
type fileStamp struct {
	mode  fs.FileMode
	size  int64
	ino   uint64
	ctime int64
}

// Load makes the root folder from the chain, and cuts off what a power cut
// left at the end of the top. One layer alone is a raw disk.
func (d *Disk) Load(chain []string) error {
	if err := os.Mkdir(d.Root, 0o755); err != nil {
		return fmt.Errorf("make fake disk: %w", err)
	}
	for i, path := range chain {
		payloads, end, err := readLayer(path, i == 0)
		if err != nil {
			return err
		}
		for _, p := range payloads {
			if err := apply(d.Root, p); err != nil {
				return fmt.Errorf("apply layer %q: %w", path, err)
			}
		}
		if i == len(chain)-1 && i > 0 {
			if err := os.Truncate(path, end); err != nil {
				return fmt.Errorf("open top layer: %w", err)
			}
		}
	}
	d.top = chain[len(chain)-1]
	if len(chain) == 1 {
		if err := d.loadRaw(); err != nil {
			return err
		}
	}
	known, err := d.scan()
	d.known = known
	return err
}

// Switch makes top, an empty layer that exists, the layer that takes the
// differences from now on; those until now are in the old one. On error nothing
// has changed.
func (d *Disk) Switch(top string) error {
	payloads, _, err := readLayer(top, false)
	if err != nil {
		return err
	}
	if len(payloads) > 0 {
		return fmt.Errorf("switch disk: the new top %q is not empty", top)
	}
	if err := d.Sync(); err != nil {
		return err
	}
	d.top, d.end = top, 0
	return nil
}

// scan walks the root; sockets and what memory file systems hold is left out.
func (d *Disk) scan() (map[string]fileStamp, error) {
	found := map[string]fileStamp{}
	err := filepath.WalkDir(d.Root, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		} else if err != nil {
			return err
		}
		rel, err := filepath.Rel(d.Root, path)
		if err != nil || rel == "." {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return nil // gone since
		}
		if info.Mode()&fs.ModeSocket == 0 {
			found[rel] = stamp(info)
		}
		if e.IsDir() && slices.Contains(d.Memory, rel) {
			return fs.SkipDir
		}
		return nil
	})
	return found, err
}

// Digest is a digest of the names and contents on the disk, without those in
// memory file systems: the same for a Disk that is loaded from these layers.
func (d *Disk) Digest() (string, error) {
	found, err := d.scan()
	if err != nil {
		return "", fmt.Errorf("scan fake disk: %w", err)
	}
	sum := sha256.New()
	for _, rel := range slices.Sorted(maps.Keys(found)) {
		path := filepath.Join(d.Root, rel)
		var content []byte
		switch found[rel].mode.Type() {
		case 0:
			content, err = os.ReadFile(path)
		case fs.ModeSymlink:
			var link string
			link, err = os.Readlink(path)
			content = []byte(link)
		default:
			continue
		}
		if err != nil {
			return "", fmt.Errorf("read fake disk: %w", err)
		}
		fmt.Fprintf(sum, "%q %d\n", rel, len(content))
		sum.Write(content)
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

func stamp(info fs.FileInfo) fileStamp {
	s := fileStamp{mode: info.Mode(), size: info.Size()}
	if info.IsDir() {
		s.size = 0
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && !info.IsDir() {
		s.ino, s.ctime = st.Ino, st.Ctim.Nano()
	}
	return s
}

// Sync appends what changed since the last sync to the top.
func (d *Disk) Sync() error {
	// A file changed within the clock's last ticks may change again without
	// a new ctime: it is recorded again next time. A tick is at most 10 ms.
	fresh := time.Now().Add(-30 * time.Millisecond).UnixNano()
	now, err := d.scan()
	if err != nil {
		return fmt.Errorf("scan fake disk: %w", err)
	}
	var removed, changed []string
	for rel := range d.known {
		if _, ok := now[rel]; !ok {
			removed = append(removed, rel)
		}
	}
	for rel, s := range now {
		if d.known[rel] != s {
			changed = append(changed, rel)
		}
		if s.ctime > fresh {
			s.ctime = 0
			now[rel] = s
		}
	}
	if len(removed)+len(changed) > 0 {
		slices.Sort(removed)
		slices.Sort(changed)
		payload, err := d.pack(removed, changed)
		if err != nil {
			return fmt.Errorf("pack fake disk: %w", err)
		}
		if err := d.add(payload); err != nil {
			return err
		}
	}
	d.known = now
	return nil
}

func (d *Disk) pack(removed, changed []string) ([]byte, error) {
	var buf bytes.Buffer
	gz, err := gzip.NewWriterLevel(&buf, gzip.BestSpeed)
	if err != nil {
		return nil, err
	}
	tw := tar.NewWriter(gz)
	for _, rel := range removed {
		h := &tar.Header{Name: rel, Typeflag: tar.TypeReg, Format: tar.FormatPAX, PAXRecords: map[string]string{removedRecord: "1"}}
		if err := tw.WriteHeader(h); err != nil {
			return nil, err
		}
	}
	for _, rel := range changed {
		if err := d.packFile(tw, rel); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	if err := errors.Join(tw.Close(), gz.Close()); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

func (d *Disk) packFile(tw *tar.Writer, rel string) error {
	path := filepath.Join(d.Root, rel)
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	link := ""
	var file *os.File
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		if link, err = os.Readlink(path); err != nil {
			return err
		}
	case info.Mode().IsRegular():
		if file, err = os.Open(path); err != nil {
			return err
		}
		defer file.Close()
		if info, err = file.Stat(); err != nil {
			return err
		}
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name, h.Format = rel, tar.FormatPAX
	if err := tw.WriteHeader(h); err != nil || file == nil {
		return err
	}
	// The guest may cut the file short meanwhile: what is missing reads as zeros.
	_, err = io.CopyN(tw, io.MultiReader(file, zeros{}), info.Size())
	return err
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
