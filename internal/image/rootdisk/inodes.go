package rootdisk

import (
	"archive/tar"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/oci/tree"
)

// Features of ext4 (Documentation/filesystems/ext4/ in the kernel's source).
const (
	incompatMetaBG     = 0x10
	incompatExtents    = 0x40
	incompat64Bit      = 0x80
	incompatSeed       = 0x2000
	incompatInlineData = 0x8000
	roCompatChecksums  = 0x400

	flagExtents = 0x80000
	extentMagic = 0xf30a
	superOffset = 1024
	superMagic  = 0xef53
	rootInode   = 2
)

// errLayout is about a file system that mkfs.ext4 made otherwise than it does
// with the options it is given.
var errLayout = errors.New("the new file system is not laid out as expected")

// filesystem is an ext4 file system that mkfs.ext4 has just made and nobody
// has mounted yet: it needs no journal to be changed.
type filesystem struct {
	file                *os.File
	block               int64
	perGroup, inodes    uint32
	inodeSize, descSize int64
	descriptors         int64 // where the group descriptors begin
	checksums           bool
	seed                uint32
	table               *crc32.Table
}

// openFilesystem reads the superblock.
func openFilesystem(file *os.File) (*filesystem, error) {
	var sb [1024]byte
	if _, err := file.ReadAt(sb[:], superOffset); err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	incompat := le.Uint32(sb[96:])
	if le.Uint16(sb[56:]) != superMagic || le.Uint32(sb[24:]) > 5 || le.Uint32(sb[40:]) == 0 ||
		incompat&incompatExtents == 0 || incompat&(incompatMetaBG|incompatInlineData) != 0 {
		return nil, errLayout
	}
	f := &filesystem{
		file: file, block: 1024 << le.Uint32(sb[24:]), inodes: le.Uint32(sb[0:]), perGroup: le.Uint32(sb[40:]),
		inodeSize: int64(le.Uint16(sb[88:])), descSize: 32,
		checksums: le.Uint32(sb[100:])&roCompatChecksums != 0, table: crc32.MakeTable(crc32.Castagnoli),
	}
	f.descriptors = (int64(le.Uint32(sb[20:])) + 1) * f.block
	if incompat&incompat64Bit != 0 {
		f.descSize = int64(le.Uint16(sb[254:]))
	}
	f.seed = f.crc(^uint32(0), sb[104:120])
	if incompat&incompatSeed != 0 {
		f.seed = le.Uint32(sb[624:])
	}
	if f.inodeSize < 128 || f.inodeSize > f.block || f.descSize < 32 || f.descSize > f.block {
		return nil, errLayout
	}
	return f, nil
}

// crc continues ext4's crc32c, which is not inverted at either end.
func (f *filesystem) crc(crc uint32, p []byte) uint32 { return ^crc32.Update(^crc, f.table, p) }

// offset is where an inode is in the file.
func (f *filesystem) offset(ino uint32) (int64, error) {
	if ino == 0 || ino > f.inodes {
		return 0, errLayout
	}
	desc := make([]byte, f.descSize)
	if _, err := f.file.ReadAt(desc, f.descriptors+int64((ino-1)/f.perGroup)*f.descSize); err != nil {
		return 0, err
	}
	table := int64(binary.LittleEndian.Uint32(desc[8:]))
	if f.descSize >= 64 {
		table |= int64(binary.LittleEndian.Uint32(desc[40:])) << 32
	}
	return table*f.block + int64((ino-1)%f.perGroup)*f.inodeSize, nil
}

// own gives an inode its mode, owner and time of change, and returns it.
func (f *filesystem) own(ino uint32, want tree.Attributes) ([]byte, error) {
	at, err := f.offset(ino)
	if err != nil {
		return nil, err
	}
	inode := make([]byte, f.inodeSize)
	if _, err := f.file.ReadAt(inode, at); err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	kind := le.Uint16(inode) & unix.S_IFMT
	if kind != kindBits(want.Type) {
		return nil, errLayout
	}
	le.PutUint16(inode, kind|uint16(want.Mode))
	le.PutUint16(inode[2:], uint16(want.UID))
	le.PutUint16(inode[24:], uint16(want.GID))
	le.PutUint16(inode[120:], uint16(want.UID>>16))
	le.PutUint16(inode[122:], uint16(want.GID>>16))
	setTime(inode, want.ModTime)
	if kind == unix.S_IFCHR || kind == unix.S_IFBLK {
		setDevice(inode, want.Major, want.Minor)
	}
	f.sign(ino, inode)
	_, err = f.file.WriteAt(inode, at)
	return inode, err
}

// kindBits is a type of file as the kernel numbers it.
func kindBits(kind byte) uint16 {
	switch kind {
	case tar.TypeDir:
		return unix.S_IFDIR
	case tar.TypeSymlink:
		return unix.S_IFLNK
	case tar.TypeChar:
		return unix.S_IFCHR
	case tar.TypeBlock:
		return unix.S_IFBLK
	case tar.TypeFifo:
		return unix.S_IFIFO
	}
	return unix.S_IFREG
}

// setTime sets when the content was changed: 32 bits of seconds since 1970, and
// in larger inodes two more of them and the nanoseconds.
func setTime(inode []byte, t time.Time) {
	le := binary.LittleEndian
	seconds := t.Unix()
	le.PutUint32(inode[16:], uint32(seconds))
	if len(inode) > 128 && le.Uint16(inode[128:]) >= 12 {
		epoch := uint32((seconds-int64(int32(seconds)))>>32) & 3
		le.PutUint32(inode[136:], uint32(t.Nanosecond())<<2|epoch)
	}
}

// setDevice writes a device's numbers where a file has its extents: small ones
// in the first word, others in the second.
func setDevice(inode []byte, major, minor uint32) {
	le := binary.LittleEndian
	small, large := major<<8|minor, uint32(0)
	if major > 255 || minor > 255 {
		small, large = 0, minor&0xff|major<<8|minor&^0xff<<12
	}
	le.PutUint32(inode[40:], small)
	le.PutUint32(inode[44:], large)
}

// sign computes an inode's checksum: of its number, its generation and all of
// it but the checksum. Its upper half is in what larger inodes have more.
func (f *filesystem) sign(ino uint32, inode []byte) {
	if !f.checksums {
		return
	}
	le := binary.LittleEndian
	high := len(inode) > 128 && le.Uint16(inode[128:]) >= 4
	le.PutUint16(inode[124:], 0)
	if high {
		le.PutUint16(inode[130:], 0)
	}
	crc := f.crc(f.seed, le.AppendUint32(nil, ino))
	crc = f.crc(f.crc(crc, inode[100:104]), inode)
	le.PutUint16(inode[124:], uint16(crc))
	if high {
		le.PutUint16(inode[130:], uint16(crc>>16))
	}
}

// chown gives a folder and all files below it what want says of them by their
// paths. It goes through the file system by itself, for mkfs.ext4 does
// not tell which inodes it took.
func (f *filesystem) chown(ctx context.Context, ino uint32, dir string, want map[string]tree.Attributes) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	inode, err := f.own(ino, want[dir])
	if err != nil {
		return fmt.Errorf("give an owner to %.300q: %w", dir, err)
	}
	if binary.LittleEndian.Uint32(inode[32:])&flagExtents == 0 {
		return errLayout
	}
	return f.extents(inode[40:100], func(block []byte) error {
		return eachName(block, func(ino uint32, name string) error {
			at := path.Join(dir, name)
			attributes, ok := want[at]
			if name == "." || name == ".." || !ok { // as lost+found is not
				return nil
			}
			if attributes.Type == tar.TypeDir {
				return f.chown(ctx, ino, at, want)
			}
			_, err := f.own(ino, attributes)
			return err
		})
	})
}

// extents calls visit with each block of a file.
func (f *filesystem) extents(node []byte, visit func(block []byte) error) error {
	le := binary.LittleEndian
	entries, depth := int(le.Uint16(node[2:])), le.Uint16(node[6:])
	if le.Uint16(node) != extentMagic || 12*(entries+1) > len(node) || depth > 5 {
		return errLayout
	}
	block := make([]byte, f.block)
	for i := range entries {
		e := node[12*(i+1):]
		start, count := int64(le.Uint32(e[8:]))|int64(le.Uint16(e[6:]))<<32, int(le.Uint16(e[4:]))
		if depth > 0 {
			start, count = int64(le.Uint32(e[4:]))|int64(le.Uint16(e[8:]))<<32, 1
		}
		for n := range count {
			if _, err := f.file.ReadAt(block, (start+int64(n))*f.block); err != nil {
				return err
			}
			next := visit
			if depth > 0 {
				next = func(node []byte) error { return f.lower(node, depth, visit) }
			}
			if err := next(block); err != nil {
				return err
			}
		}
	}
	return nil
}

// lower visits a node of an extent tree that has to be below depth.
func (f *filesystem) lower(node []byte, depth uint16, visit func(block []byte) error) error {
	if binary.LittleEndian.Uint16(node[6:]) >= depth {
		return errLayout
	}
	return f.extents(node, visit)
}

// eachName calls visit for each name in a block of a folder.
func eachName(block []byte, visit func(ino uint32, name string) error) error {
	le := binary.LittleEndian
	for len(block) > 0 {
		if len(block) < 8 {
			return errLayout
		}
		ino, length, name := le.Uint32(block), int(le.Uint16(block[4:])), int(block[6])
		if length < 8+name || length > len(block) {
			return errLayout
		}
		if ino != 0 {
			if err := visit(ino, string(block[8:8+name])); err != nil {
				return err
			}
		}
		block = block[length:]
	}
	return nil
}
