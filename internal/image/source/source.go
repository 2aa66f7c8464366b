// Package source takes the root file system out of a disk that somebody else
// made: a raw or qcow2 file with a bare ext4 file system or a GUID partition
// table. The file may be hostile: headers are parsed here, with limits, before
// a tool opens it, and the tools run with limits too. It makes no image.
package source

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// maxCandidates is how many ext4 partitions a disk may have.
const maxCandidates = 8

// spare is the space wanted besides what is copied, in bytes: for a kernel, its
// modules and what the file system's check writes.
const spare = 128 << 20

// Config says what to take, and where it goes.
type Config struct {
	// Path is the file, absolute.
	Path string
	// SHA256 is the file's digest as it should be, 64 hexadecimal digits; empty
	// when it is not known.
	SHA256 string
	// Partition is the number of the root's partition; 0 to find it.
	Partition int
	// Work is an empty private folder. What is left in it is the caller's.
	Work string
	// Report is told how far a phase is, in bytes; total 0 is unknown.
	Report func(phase string, done, total int64)
}

// Root is a root file system that was taken out.
type Root struct {
	// Path is a raw disk in the work folder that is one sound ext4 file system,
	// of whole MiB.
	Path string
	Tree
	// BootTrees are the disk's other ext4 file systems, one of which may be /boot.
	BootTrees []Tree
	// Notes are what a person should know, a line each.
	Notes []string
}

// At is the root that is the raw disk at path, one ext4 file system of ours.
func At(path string) Root { return Root{Path: path, Tree: Tree{path}} }

// Extract takes the root file system out of a file. A file that is none, is
// damaged or has no one root is INVALID, one that is not there NOT_FOUND, one
// that changes meanwhile CONFLICT; too little space is NO_SPACE.
func Extract(ctx context.Context, cfg Config) (Root, error) {
	f, err := open(cfg.Path)
	if err != nil {
		return Root{}, err
	}
	defer f.Close()
	if cfg.SHA256 != "" {
		report := func(done, total int64) { cfg.Report("checking the file's sha256", done, total) }
		if err := CheckSHA256(ctx, f.File, cfg.SHA256, "download it again", report); err != nil {
			return Root{}, err
		}
	}
	x := extraction{Config: cfg, file: f}
	root, err := x.run(ctx)
	if err != nil {
		return Root{}, err
	}
	return root, f.unchanged()
}

type extraction struct {
	Config
	file *file
}

// candidate is an ext4 file system of the disk.
type candidate struct {
	partition
	super
	tree Tree
	// root is whether it could be one; trouble is what kept that from being
	// found out.
	root    bool
	trouble error
}

func (x *extraction) run(ctx context.Context) (Root, error) {
	x.Report("looking at the file", 0, 0)
	if err := x.file.measure(ctx); err != nil {
		return Root{}, err
	}
	found, err := x.candidates(ctx)
	if err != nil {
		return Root{}, err
	}
	if err := x.checkSpace(found); err != nil {
		return Root{}, err
	}
	for _, c := range found {
		if err := x.fetch(ctx, c); err != nil {
			return Root{}, err
		}
	}
	chosen, err := x.choose(found)
	if err != nil {
		return Root{}, err
	}
	x.Report("checking the file system", 0, 0)
	root := Root{Path: chosen.tree.path, Tree: chosen.tree}
	note, err := chosen.tree.settle(ctx, chosen.unclean)
	if err != nil {
		return Root{}, fmt.Errorf("%s: %s: %w", x.Path, chosen.partition, err)
	}
	if note != "" {
		root.Notes = append(root.Notes, note)
	}
	for _, c := range found {
		if c != chosen {
			root.BootTrees = append(root.BootTrees, c.tree)
		}
	}
	return root, roundUp(root.Path)
}

// candidates are the disk's ext4 file systems that could be a root or /boot.
func (x *extraction) candidates(ctx context.Context) ([]*candidate, error) {
	refuse := func(err error) error { return errdefs.New(errdefs.Invalid, "%s: %w", x.Path, err) }
	head, err := x.file.read(ctx, x.Work, 0, headBytes)
	if err != nil {
		return nil, err
	}
	parts := []partition{{size: x.file.size}}
	switch {
	case isGPT(head):
		if parts, err = parseGPT(head, x.file.size); err != nil {
			return nil, refuse(err)
		}
	case x.Partition != 0:
		return nil, errdefs.New(errdefs.Invalid, "%s: it has no partitions; leave --partition out", x.Path)
	case !isExt(head):
		return nil, errdefs.New(errdefs.Invalid, "%s: it is neither a disk (an ext4 file system or a GUID partition table, raw or qcow2) nor a container image (a tar that docker save writes, or an OCI layout); give one of these", x.Path)
	}
	var found []*candidate
	for _, p := range parts {
		wanted := p.number == x.Partition || p.kind == typeRoot || p.kind == typeLinux || p.kind == typeBoot
		if !wanted || p.size < superBytes {
			continue
		}
		if p.number != 0 {
			if head, err = x.file.read(ctx, x.Work, p.offset, superBytes); err != nil {
				return nil, err
			}
		}
		if !isExt(head) {
			continue
		}
		s, err := parseSuper(head, p.size)
		if err != nil {
			return nil, refuse(fmt.Errorf("%s: %w", p, err))
		}
		found = append(found, &candidate{partition: p, super: s})
	}
	if len(found) > maxCandidates {
		return nil, errdefs.New(errdefs.Invalid, "%s: it has %d ext4 partitions, more than the %d that are looked at", x.Path, len(found), maxCandidates)
	}
	return found, nil
}

// checkSpace refuses what would fill the disk.
func (x *extraction) checkSpace(found []*candidate) error {
	var need int64
	for _, c := range found {
		need += c.size
	}
	need = min(need, x.file.stored) + spare
	free, err := durable.FreeBytes(x.Work)
	if err != nil {
		return err
	}
	if free < need {
		return errdefs.New(errdefs.NoSpace, "space for a copy of the disk: %d MiB are free and up to %d MiB are needed; free some and import again", free>>20, need>>20)
	}
	return nil
}

// fetch copies a candidate and finds out whether it is a root.
func (x *extraction) fetch(ctx context.Context, c *candidate) error {
	c.tree.path = filepath.Join(x.Work, "partition-"+strconv.Itoa(c.number))
	err := x.file.copy(ctx, c.tree.path, c.offset, c.size, func(done, total int64) { x.Report("copying "+c.partition.String(), done, total) })
	if err != nil {
		return err
	}
	if c.kind == typeBoot && c.number != x.Partition {
		return nil
	}
	c.root, c.trouble = c.tree.isRoot(ctx)
	return ctx.Err()
}

// choose finds the one root.
func (x *extraction) choose(found []*candidate) (*candidate, error) {
	var roots []*candidate
	var names []string
	for _, c := range found {
		names = append(names, c.partition.String())
		if c.root && cmp.Or(x.Partition, c.number) == c.number {
			roots = append(roots, c)
		}
	}
	if len(roots) == 1 {
		return roots[0], nil
	}
	for _, c := range found {
		if len(roots) == 0 && c.trouble != nil {
			return nil, fmt.Errorf("%s: %s: %w", x.Path, c.partition, c.trouble)
		}
	}
	switch {
	case len(roots) > 1:
		names = nil
		for _, c := range roots {
			names = append(names, c.partition.String())
		}
		return nil, errdefs.New(errdefs.Invalid, "%s: more than one partition could be the root: %s; choose one with --partition", x.Path, strings.Join(names, ", "))
	case x.Partition != 0:
		return nil, errdefs.New(errdefs.Invalid, "%s: partition %d is not there or no ext4 root with /etc and an init or a shell; there are: %s", x.Path, x.Partition, cmp.Or(strings.Join(names, ", "), "none"))
	}
	return nil, errdefs.New(errdefs.Invalid, "%s: no ext4 file system in it has /etc and an init or a shell; looked at: %s", x.Path, cmp.Or(strings.Join(names, ", "), "none"))
}

// roundUp makes the disk whole MiB, as all images' are; a guest's file system
// grows into it.
func roundUp(path string) error {
	info, err := os.Stat(path)
	if err == nil {
		err = os.Truncate(path, (info.Size()+1<<20-1)&^(1<<20-1))
	}
	if err != nil {
		return storage(path, err)
	}
	return nil
}
