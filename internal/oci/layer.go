package oci

import (
	"bufio"
	"context"
	"errors"
	"hash"
	"io"
	"io/fs"
	"syscall"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// maxWindow is how far back a zstd frame may point, in bytes; it is what zstd
// itself takes unless it is told otherwise.
const maxWindow = 128 << 20

// layerReader reads a layer's tar from its blob and checks both on the way.
type layerReader struct {
	layer layer
	// stored is what was read of the blob, unpacked what was made of it;
	// logical is the content of its files with holes counted as data.
	stored, unpacked, logical int64
	// left is how many bytes the layer may have, either way, of the limit.
	left, limit int64

	storedHash, unpackedHash hash.Hash
	blob                     *bufio.Reader
	tar                      io.Reader
	close                    func()
}

// checked hands on what it reads, after look.
type checked struct {
	r    io.Reader
	look func(p []byte) error
}

func (c checked) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if bad := c.look(p[:n]); bad != nil {
		return 0, bad
	}
	return n, err
}

// open begins to read the layer; progress gets the bytes read of the blob.
func (img *Image) open(ctx context.Context, l layer, left int64, progress func(n int64)) (*layerReader, error) {
	f, _, err := img.src.open(l.name)
	if err != nil {
		return nil, err
	}
	r := &layerReader{layer: l, left: left, limit: img.maxBytes, close: func() { f.Close() }, unpackedHash: l.diffID.hash()}
	if !l.digest.isZero() {
		r.storedHash = l.digest.hash()
	}
	r.blob = bufio.NewReaderSize(checked{io.LimitReader(f, l.size+1), func(p []byte) error {
		r.stored += int64(len(p))
		if r.storedHash != nil {
			r.storedHash.Write(p)
		}
		progress(int64(len(p)))
		return ctx.Err()
	}}, 256<<10)
	plain, err := r.decompress()
	if err != nil {
		r.close()
		return nil, r.explain(err)
	}
	r.tar = checked{plain, func(p []byte) error {
		r.unpackedHash.Write(p)
		r.unpacked += int64(len(p))
		if err := ctx.Err(); err != nil {
			return err
		}
		return r.checkSize()
	}}
	return r, nil
}

// decompress finds out how the blob is compressed by how it begins: media
// types of gzip are known to stand over layers that are not.
func (r *layerReader) decompress() (io.Reader, error) {
	head, err := r.blob.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	begins := func(magic string) bool { return len(head) >= len(magic) && string(head[:len(magic)]) == magic }
	switch {
	case begins(gzipMagic):
		return gzip.NewReader(r.blob)
	case begins(zstdMagic):
		d, err := zstd.NewReader(r.blob, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, err
		}
		closeBlob := r.close
		r.close = func() { d.Close(); closeBlob() }
		return d, nil
	case begins(xzMagic), begins(bzip2Magic):
		return nil, errdefs.New(errdefs.Unsupported, "it is compressed neither with gzip nor with zstd")
	}
	return r.blob, nil
}

// charge counts the content of a file before it is read.
func (r *layerReader) charge(size int64) error {
	if size < 0 || size > r.left-r.logical {
		return r.tooLarge()
	}
	r.logical += size
	return r.checkSize()
}

func (r *layerReader) checkSize() error {
	size := max(r.unpacked, r.logical)
	switch {
	case size > r.left:
		return r.tooLarge()
	case size > freeRatio && size/maxRatio > r.layer.size:
		return errdefs.New(errdefs.Invalid, "it unpacks to more than %d times its size, which no honest layer does", maxRatio)
	}
	return nil
}

func (r *layerReader) tooLarge() error {
	return errdefs.New(errdefs.Invalid, "with it the image is larger than the %d bytes it may have; allow it more if that is meant", r.limit)
}

// finish reads what follows the tar's end and checks sizes and digests.
func (r *layerReader) finish() error {
	if _, err := io.Copy(io.Discard, r.tar); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, r.blob); err != nil {
		return err
	}
	switch {
	case r.stored != r.layer.size:
		return errdefs.New(errdefs.Invalid, "it has %d bytes instead of %d", r.stored, r.layer.size)
	case r.storedHash != nil && !r.layer.digest.is(r.storedHash):
		return errdefs.New(errdefs.Invalid, "it does not have the digest %s; it is damaged", r.layer.digest)
	case !r.layer.diffID.is(r.unpackedHash):
		return errdefs.New(errdefs.Invalid, "unpacked it does not have the digest %s that the config gives; it is damaged", r.layer.diffID)
	}
	return nil
}

// explain says which layer an error is about. What no file said and has no
// kind comes of decoding.
func (r *layerReader) explain(err error) error {
	var pe *fs.PathError
	kind := errdefs.KindOf(err)
	switch {
	case errors.Is(err, syscall.ENOSPC):
		kind = errdefs.NoSpace
	case errors.Is(err, io.ErrUnexpectedEOF):
		return errdefs.New(errdefs.Invalid, "layer %.300q: it is cut off", r.layer.name)
	case errors.As(err, &pe):
		kind = errdefs.Storage
	case kind == errdefs.Internal:
		return errdefs.New(errdefs.Invalid, "layer %.300q: it is no tar, or damaged: %w", r.layer.name, err)
	}
	return errdefs.New(kind, "layer %.300q: %w", r.layer.name, err)
}
