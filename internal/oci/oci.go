// Package oci reads a container image, from an OCI image layout or from what
// `docker save` wrote, and merges its layers into the one tree of files that a
// container would see. It runs nothing, asks no registry and needs no root;
// making a disk of the tree is not its business.
//
// An image is hostile until it is merged: every blob's size and digest is
// checked before its content counts, names never lead out of the source, and
// all that an image can make large is bounded.
//
// How the pieces go together:
//
//	img, err := oci.Open(ctx, path, oci.Options{Name: "debian:12"})
//	defer img.Close()
//	files, err := img.Merge(ctx, scratch, progress) // a new, private folder
//	user, err := files.User(img.Config.User)
//	kernel, err := files.ReadFile("/boot/vmlinuz", limit)
//
// Package rootdisk then makes an ext4 file system of the tree, for which its
// folder and scratch have to be on one file system.
package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/oci/tree"
)

// Limits on what an image may hold. Real ones are far below: Docker allows 127
// layers.
const (
	maxDocument   = 4 << 20 // bytes of an index, manifest or config
	maxIndexes    = 3       // indexes inside one another
	maxManifests  = 1000    // manifests in all indexes
	maxMembers    = 20_000  // files in a docker save tar
	maxMemberName = 4 << 10 // bytes of a file's name in it and of what it links to
	maxLayers     = 256
	// A layer may be maxRatio times as large as its blob once it is beyond
	// freeRatio bytes; gzip and zstd make bombs of 1,000 times and more.
	maxRatio  = 200
	freeRatio = 1 << 30
)

// DefaultMaxBytes is how large an image may be where nothing else is said.
const DefaultMaxBytes = 64 << 30

// Options says which image of several is meant, and how large it may be.
type Options struct {
	// Name chooses by tag or name ("12", "debian:12"); empty where the source
	// has only one.
	Name string
	// MaxBytes limits the bytes of all layers, unpacked and with holes counted
	// as data; 0 for DefaultMaxBytes.
	MaxBytes int64
}

// Image is a container image for linux/amd64 whose manifest and config were
// read and checked; its layers are read by Merge. It keeps its source open
// until Close.
type Image struct {
	// Config is what the image says about running it.
	Config Config
	// Bytes is the size of all layers as they are stored.
	Bytes int64

	src      source
	layers   []layer
	maxBytes int64
}

// layer is one layer of an image, as its manifest and config describe it.
type layer struct {
	// name is the blob's path in the source.
	name string
	// digest and size are of the blob; a docker save tar without an index has
	// none, so that only diffID counts.
	digest digest
	size   int64
	// diffID is the digest of the unpacked layer.
	diffID digest
}

// Open opens an image: a folder that is an OCI image layout, or a tar that
// `docker save` wrote, with an OCI layout in it or in the older form. Several
// images and no name are INVALID with all names, a name that is not there
// NOT_FOUND with those that are, an image for other platforms or with layers
// that are elsewhere UNSUPPORTED, and what is damaged INVALID.
func Open(ctx context.Context, path string, opt Options) (*Image, error) {
	if opt.MaxBytes == 0 {
		opt.MaxBytes = DefaultMaxBytes
	}
	src, err := openSource(ctx, path)
	if err != nil {
		return nil, named("open image", path, err)
	}
	img := &Image{src: src, maxBytes: opt.MaxBytes}
	if err := img.read(ctx, opt.Name); err != nil {
		src.Close()
		return nil, named("open image", path, err)
	}
	return img, nil
}

// Close closes the image's source. A merged tree needs it no longer.
func (img *Image) Close() error { return img.src.Close() }

func (img *Image) read(ctx context.Context, name string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	data, err := readDocument(img.src, "oci-layout", digest{}, -1)
	switch {
	case err == nil:
		if err := checkLayout(data); err != nil {
			return err
		}
		return img.readLayout(name)
	case !errdefs.Is(err, errdefs.NotFound):
		return err
	}
	err = img.readLegacy(name)
	if errors.Is(err, errNoLegacy) {
		return errdefs.New(errdefs.Invalid, "it has neither an oci-layout nor a manifest.json; give an OCI layout or the output of docker save")
	}
	return err
}

// Merge reads and checks all layers and merges them. The content of files goes
// into scratch, an empty folder that nobody else writes to; it holds files
// called by number afterwards, whether or not Merge succeeds, and is the
// caller's to remove. progress, if not nil, is called with the bytes read so
// far of img.Bytes. A damaged or hostile layer is INVALID and named, one
// compressed in an unknown way UNSUPPORTED, a full disk NO_SPACE.
func (img *Image) Merge(ctx context.Context, scratch string, progress func(done int64)) (*tree.Tree, error) {
	files := tree.New(scratch)
	done, left := int64(0), img.maxBytes
	for _, l := range img.layers {
		r, err := img.open(ctx, l, left, func(n int64) {
			if done += n; progress != nil && n > 0 {
				progress(done)
			}
		})
		if err != nil {
			return nil, fmt.Errorf("merge image: %w", err)
		}
		err = files.AddLayer(r.tar, r.charge)
		if err == nil {
			err = r.finish()
		}
		r.close()
		if err != nil {
			return nil, fmt.Errorf("merge image: %w", r.explain(err))
		}
		left -= max(r.unpacked, r.logical)
	}
	return files, nil
}

// named says what was done to which path, and keeps the kind of err.
func named(verb, path string, err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) && pe.Path == path {
		err = pe.Err
	}
	kind := errdefs.KindOf(err)
	switch {
	case errors.Is(err, fs.ErrNotExist) && kind == errdefs.Internal:
		kind = errdefs.NotFound
	case errors.Is(err, fs.ErrPermission) && kind == errdefs.Internal:
		kind = errdefs.Denied
	}
	return errdefs.New(kind, "%s %q: %w", verb, path, err)
}

// readDocument reads a small file of the source. A size of -1 and a digest
// that is zero are not checked.
func readDocument(src source, name string, want digest, size int64) ([]byte, error) {
	f, have, err := src.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if have > maxDocument {
		return nil, errdefs.New(errdefs.Invalid, "%.300q has %d bytes, more than the %d that such a file may have", name, have, maxDocument)
	}
	if size >= 0 && have != size {
		return nil, errdefs.New(errdefs.Invalid, "%.300q has %d bytes instead of %d; it is damaged or cut off", name, have, size)
	}
	data := make([]byte, have)
	if _, err := io.ReadFull(f, data); err != nil {
		return nil, errdefs.New(errdefs.Invalid, "read %.300q: it is cut off: %w", name, err)
	}
	if !want.isZero() && !want.matches(data) {
		return nil, errdefs.New(errdefs.Invalid, "%.300q does not have the digest %s; it is damaged", name, want)
	}
	return data, nil
}
