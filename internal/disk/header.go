package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Header is what matters of a qcow2 file's header. The fields and numbers are
// those of docs/interop/qcow2.rst in QEMU's source.
type Header struct {
	// Version is 2 or 3.
	Version int
	// VirtualSize is what the guest sees, in bytes.
	VirtualSize int64
	ClusterBits int
	// BackingFile is the file name the header asks to follow; "" for none.
	BackingFile string
	// DataFile is whether guest data is in another file, named or not.
	DataFile bool
	// Encrypted, Snapshots and Unknown are features that no overlay of ours has:
	// encryption, internal snapshots, incompatible features not known here.
	Encrypted bool
	Snapshots int
	Unknown   uint64
}

const (
	qcowMagic  = 0x514649fb
	maxVirtual = 1 << 50
	maxName    = 1023 // the format's own limit of a backing file name
	// maxExtensions bounds the walk over header extensions.
	maxExtensions = 64

	// Incompatible features: dirty, corrupt, external data file, compression
	// type, extended L2 entries.
	featureDataFile = 1 << 2
	featuresKnown   = 1<<0 | 1<<1 | featureDataFile | 1<<3 | 1<<4

	extensionEnd      = 0
	extensionDataFile = 0x44415441
)

// ReadHeader reads the header of the qcow2 file at path. INVALID when it is
// none.
func ReadHeader(path string) (Header, error) {
	f, err := os.Open(path)
	if err != nil {
		return Header{}, missing(path, err)
	}
	defer f.Close()
	h, err := ParseHeader(f)
	if err != nil {
		return Header{}, errdefs.New(errdefs.Invalid, "read qcow2 header of %q: %w", path, err)
	}
	return h, nil
}

// ParseHeader reads a header from r, which may be hostile.
func ParseHeader(r io.ReaderAt) (Header, error) {
	var b [104]byte
	if n, err := r.ReadAt(b[:], 0); n < 72 {
		return Header{}, fmt.Errorf("too short: %w", err)
	}
	u32 := func(at int) uint32 { return binary.BigEndian.Uint32(b[at:]) }
	u64 := func(at int) uint64 { return binary.BigEndian.Uint64(b[at:]) }
	if u32(0) != qcowMagic {
		return Header{}, errors.New("not a qcow2 file")
	}
	h := Header{
		Version: int(u32(4)), ClusterBits: int(u32(20)), Encrypted: u32(32) != 0,
		Snapshots: int(u32(60)), VirtualSize: int64(u64(24)),
	}
	length := int64(72)
	switch h.Version {
	case 2:
	case 3:
		features := u64(72)
		h.DataFile = features&featureDataFile != 0
		h.Unknown = features &^ featuresKnown
		length = int64(u32(100))
	default:
		return Header{}, fmt.Errorf("version %d is not known", h.Version)
	}
	switch {
	case h.ClusterBits < 9 || h.ClusterBits > 21:
		return Header{}, fmt.Errorf("cluster bits %d are not in 9 to 21", h.ClusterBits)
	case h.VirtualSize < 0 || h.VirtualSize > maxVirtual:
		return Header{}, errors.New("virtual size is out of range")
	case length < 72 || h.Version == 3 && length < 104 || length > 1<<h.ClusterBits:
		return Header{}, fmt.Errorf("header length %d is out of range", length)
	}
	if err := h.readBacking(r, u64(8), u32(16)); err != nil {
		return Header{}, err
	}
	return h, h.readExtensions(r, length)
}

func (h *Header) readBacking(r io.ReaderAt, offset uint64, size uint32) error {
	if offset == 0 && size == 0 {
		return nil
	}
	if size == 0 || size > maxName || offset > maxVirtual {
		return errors.New("backing file name is out of range")
	}
	name := make([]byte, size)
	if _, err := r.ReadAt(name, int64(offset)); err != nil {
		return fmt.Errorf("read backing file name: %w", err)
	}
	h.BackingFile = string(name)
	return nil
}

func (h *Header) readExtensions(r io.ReaderAt, at int64) error {
	for range maxExtensions {
		var b [8]byte
		if at+8 > 1<<h.ClusterBits {
			return nil // the first cluster is full, which ends them too
		}
		if _, err := r.ReadAt(b[:], at); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("read header extension: %w", err)
		}
		switch binary.BigEndian.Uint32(b[:]) {
		case extensionEnd:
			return nil
		case extensionDataFile:
			h.DataFile = true
		}
		at += 8 + (int64(binary.BigEndian.Uint32(b[4:]))+7)&^7
	}
	return errors.New("too many header extensions")
}

// CheckStandalone refuses, as INVALID, a file that would make QEMU open
// another one or that has what our layers never have.
func (h Header) CheckStandalone() error {
	var what string
	switch {
	case h.BackingFile != "":
		what = fmt.Sprintf("it names the backing file %q", h.BackingFile)
	case h.DataFile:
		what = "its data is in another file"
	case h.Encrypted:
		what = "it is encrypted"
	case h.Snapshots != 0:
		what = "it has internal snapshots"
	case h.Unknown != 0:
		what = fmt.Sprintf("it has unknown features (%#x)", h.Unknown)
	default:
		return nil
	}
	return errdefs.New(errdefs.Invalid, "qcow2 file refused: %s", what)
}
