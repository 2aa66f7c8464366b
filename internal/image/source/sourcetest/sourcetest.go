// Package sourcetest makes disks for tests of imports: partition tables, small
// file systems, and kernels that only say their version. None of it is for use.
package sourcetest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"unicode/utf16"

	"golang.org/x/sys/unix"
)

// Types of partitions.
const (
	Root  = "4f68bce3-e8cd-4db1-96e7-fbcaf984b709"
	Linux = "0fc63daf-8483-4772-8e79-3d69d8477de4"
	Boot  = "bc13c2ff-59e6-4262-a352-b275fd6f7172"
	EFI   = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b"
)

// Partition is one entry of a table.
type Partition struct {
	// Number counts from 1.
	Number int
	Type   string
	Name   string
	// Offset and Size are in bytes, whole sectors of 512.
	Offset, Size int64
}

// GPT is the first MiB of a disk of size bytes with these partitions.
func GPT(size int64, partitions ...Partition) []byte {
	const sector, count, each = 512, 128, 128
	le := binary.LittleEndian
	head := make([]byte, 1<<20)
	head[446+4], head[510], head[511] = 0xee, 0x55, 0xaa // protective MBR
	table := head[2*sector:][:count*each]
	for _, p := range partitions {
		e := table[(p.Number-1)*each:][:each]
		copy(e, guid(p.Type))
		e[16] = byte(p.Number)
		le.PutUint64(e[32:], uint64(p.Offset)/sector)
		le.PutUint64(e[40:], uint64(p.Offset+p.Size)/sector-1)
		for i, u := range utf16.Encode([]rune(p.Name)) {
			le.PutUint16(e[56+2*i:], u)
		}
	}
	h := head[sector:][:92]
	copy(h, "EFI PART\x00\x00\x01\x00")
	le.PutUint32(h[12:], 92)
	le.PutUint64(h[24:], 1)
	le.PutUint64(h[32:], uint64(size)/sector-1)
	le.PutUint64(h[40:], 34)
	le.PutUint64(h[48:], uint64(size)/sector-34)
	le.PutUint64(h[72:], 2)
	le.PutUint32(h[80:], count)
	le.PutUint32(h[84:], each)
	le.PutUint32(h[88:], crc32.ChecksumIEEE(table))
	le.PutUint32(h[16:], crc32.ChecksumIEEE(h))
	return head
}

// guid is the binary form of its text.
func guid(text string) []byte {
	var a uint32
	var b, c uint16
	var d, e uint64
	if _, err := fmt.Sscanf(text, "%08x-%04x-%04x-%04x-%012x", &a, &b, &c, &d, &e); err != nil {
		panic(err)
	}
	out := binary.LittleEndian.AppendUint32(nil, a)
	out = binary.LittleEndian.AppendUint16(out, b)
	out = binary.LittleEndian.AppendUint16(out, c)
	return binary.BigEndian.AppendUint64(out, d<<48|e)
}

// WriteDisk makes a disk of size bytes at path with these partitions; files has
// by number what goes into them, holes kept.
func WriteDisk(path string, size int64, files map[int]string, partitions ...Partition) error {
	if err := os.WriteFile(path, GPT(size, partitions...), 0o600); err != nil {
		return err
	}
	if err := os.Truncate(path, size); err != nil {
		return err
	}
	out, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer out.Close()
	for _, p := range partitions {
		if files[p.Number] == "" {
			continue
		}
		if err := write(out, p.Offset, files[p.Number]); err != nil {
			return err
		}
	}
	return out.Close()
}

// write writes the data of a file, but not its holes, at an offset.
func write(out *os.File, offset int64, path string) error {
	in, err := os.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()
	for end := int64(0); ; {
		data, err := in.Seek(end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return err
		}
		if end, err = in.Seek(data, unix.SEEK_HOLE); err != nil {
			return err
		}
		if _, err := io.Copy(io.NewOffsetWriter(out, offset+data), io.NewSectionReader(in, data, end-data)); err != nil {
			return err
		}
	}
}

// WriteTree makes an ext4 file system of size bytes at path with these files, by
// their paths; one whose content begins with "-> " is a symbolic link.
func WriteTree(path string, size int64, files map[string]string) error {
	tree, err := os.MkdirTemp(filepath.Dir(path), "tree")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tree)
	for name, content := range files {
		full := filepath.Join(tree, name)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			return err
		}
		if target, ok := strings.CutPrefix(content, "-> "); ok {
			err = os.Symlink(target, full)
		} else {
			err = os.WriteFile(full, []byte(content), 0o755)
		}
		if err != nil {
			return err
		}
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(path, size); err != nil {
		return err
	}
	return run("/usr/sbin/mkfs.ext4", "-q", "-F", "-d", tree, path)
}

func run(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}

// Kernel is a file that says it is a bzImage of a version.
func Kernel(version string) []byte {
	k := make([]byte, 0x1000)
	copy(k[0x202:], "HdrS")
	binary.LittleEndian.PutUint16(k[0x20e:], 0x800)
	copy(k[0xa00:], version+" (me@here) #1 SMP")
	return k
}

// Modules are the files of a kernel's folder of modules with all that a guest
// boots with, below prefix; suffix is that of compressed ones, pack what makes
// them so. virtio_net is built in, and ext4 depends on two others.
func Modules(prefix, suffix string, pack func(string) string) map[string]string {
	if pack == nil {
		pack = func(s string) string { return s }
	}
	deps := map[string]string{
		"virtio_ring": "", "virtio": "virtio_ring", "virtio_pci": "virtio virtio_ring", "virtio_blk": "virtio virtio_ring",
		"virtio_console": "virtio virtio_ring", "ext4": "jbd2 crc16", "jbd2": "", "crc16": "", "unrelated": "ext4",
	}
	files := map[string]string{prefix + "/modules.builtin": "kernel/drivers/net/virtio_net.ko\n"}
	dep := ""
	for name, below := range deps {
		path := func(name string) string { return "kernel/" + name + ".ko" + suffix }
		files[prefix+"/"+path(name)] = pack("\x7fELF module " + name)
		dep += path(name) + ":"
		for _, b := range strings.Fields(below) {
			dep += " " + path(b)
		}
		dep += "\n"
	}
	files[prefix+"/modules.dep"] = dep
	return files
}
