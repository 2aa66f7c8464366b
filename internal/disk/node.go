package disk

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"path/filepath"
	"regexp"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// node is a QEMU block node as -blockdev and blockdev-add take it.
type node struct {
	Driver   string `json:"driver"`
	NodeName string `json:"node-name,omitempty"`
	// ReadOnly is left out of the file's node, which inherits it: only then does
	// blockdev-snapshot reopen the file under the old top read-only.
	ReadOnly *bool `json:"read-only,omitempty"`
	// Discard and DetectZeroes: a discard or a write of zeros makes clusters of
	// the overlay free. Looking for zeros costs ordinary writes less than the
	// noise of a measurement, and makes writing zeros 5 to 30 times faster.
	Discard      string `json:"discard,omitempty"`
	DetectZeroes string `json:"detect-zeroes,omitempty"`
	// Backing is null or the node below. Never left out for qcow2: QEMU would
	// follow the name in the header.
	Backing  json.RawMessage `json:"backing,omitempty"`
	File     *node           `json:"file,omitempty"`
	Filename string          `json:"filename,omitempty"`
	// AIO and Cache: buffered I/O by threads. Direct or ring I/O would write
	// into guest memory behind the back of dirty-page tracking.
	AIO   string `json:"aio,omitempty"`
	Cache *cache `json:"cache,omitempty"`
	// Locking is off for layers that a merge reads.
	Locking string `json:"locking,omitempty"`
}

type cache struct {
	Direct bool `json:"direct"`
}

var plainID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,29}$`)

// NodeName is the name of the block node that shows the layer. QEMU's limit is
// 31 characters, so a long or strange id is replaced by its hash.
func NodeName(layerID string) string { return "l-" + shortID(layerID) }

// FileNodeName is the name of the node that holds the layer's file.
func FileNodeName(layerID string) string { return "f-" + shortID(layerID) }

func shortID(id string) string {
	if plainID.MatchString(id) {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:14])
}

// ChainJSON is the node of the top of the chain (lowest layer first) with all
// below it inside, for -blockdev, blockdev-add, and json: file names. Only the
// top is writable, if writable says so. A raw layer is the lowest one, or alone.
func ChainJSON(chain []Layer, writable bool) ([]byte, error) {
	return chainJSON(chain, writable, "")
}

// MergeJSON is that of a chain to merge layers of, with a writable top: without
// locks on the files, because sealed layers never change, while QEMU's own locks
// would refuse to merge those that a machine reads; and each layer such that
// zeros written to it take no space, because QEMU merges all that a guest has
// discarded as zeros.
func MergeJSON(chain []Layer) ([]byte, error) { return chainJSON(chain, true, "off") }

func chainJSON(chain []Layer, writable bool, locking string) ([]byte, error) {
	if len(chain) == 0 {
		return nil, errdefs.New(errdefs.Invalid, "disk chain: it has no layer")
	}
	below := json.RawMessage("null")
	for i, l := range chain {
		if l.Format == Raw && i > 0 {
			return nil, errdefs.New(errdefs.Invalid, "disk chain: layer %s is raw; only the lowest layer may be", l.ID)
		}
		n, err := newNode(l, writable && i == len(chain)-1, below)
		if err != nil {
			return nil, err
		}
		if n.File.Locking = locking; locking != "" {
			n.freeZeros()
		}
		if below, err = json.Marshal(n); err != nil {
			return nil, err
		}
	}
	return below, nil
}

// OverlayArgs are the arguments of blockdev-add for an overlay that is going
// to be laid on a running chain by blockdev-snapshot, which wants it without
// anything below.
func OverlayArgs(l Layer) (any, error) {
	if l.Format != Qcow2 {
		return nil, errdefs.New(errdefs.Invalid, "overlay %s: it is %s, not qcow2", l.ID, l.Format)
	}
	return newNode(l, true, json.RawMessage("null"))
}

// MergedArgs are the arguments of blockdev-add for a sealed layer over a layer
// that is there already.
func MergedArgs(l Layer, belowID string) (any, error) {
	below, err := json.Marshal(NodeName(belowID))
	if err != nil {
		return nil, err
	}
	return newNode(l, false, below)
}

// ReopenArgs are the arguments of blockdev-reopen that put a layer's node on
// another one, which is there already. All else stays as it was made; QEMU wants
// it repeated.
func ReopenArgs(l Layer, writable bool, belowID string) (any, error) {
	n, err := newNode(l, writable, nil)
	if err != nil {
		return nil, err
	}
	type reopened struct {
		*node
		File    string `json:"file"`
		Backing string `json:"backing"`
	}
	return map[string]any{"options": []reopened{{n, FileNodeName(l.ID), NodeName(belowID)}}}, nil
}

func newNode(l Layer, writable bool, below json.RawMessage) (*node, error) {
	if !filepath.IsAbs(l.Path) {
		return nil, errdefs.New(errdefs.Invalid, "layer %s: path %q is not absolute", l.ID, l.Path)
	}
	readOnly := !writable
	n := &node{
		Driver: l.Format, NodeName: NodeName(l.ID), ReadOnly: &readOnly,
		File: &node{
			Driver: "file", NodeName: FileNodeName(l.ID), Filename: l.Path,
			AIO: "threads", Cache: &cache{},
		},
	}
	switch l.Format {
	case Qcow2:
		n.Backing = below
	case Raw:
	default:
		return nil, errdefs.New(errdefs.Invalid, "layer %s: unknown format %q", l.ID, l.Format)
	}
	if writable {
		n.freeZeros()
	}
	return n, nil
}

// freeZeros makes a discard or a write of zeros free clusters.
func (n *node) freeZeros() { n.Discard, n.File.Discard, n.DetectZeroes = "unmap", "unmap", "unmap" }
