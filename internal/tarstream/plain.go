package tarstream

import (
	"archive/tar"
	"context"
	"errors"
	"io"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Plain copies the archive r to w as one that any program reads: holes are
// zeros there. Names that lead out are refused as by Unpack; special files are
// left out, and so are the bits that Unpack drops. On error w has a part of it.
func Plain(ctx context.Context, w io.Writer, r io.Reader) (Result, error) {
	var res Result
	tr, tw := newReader(r), tar.NewWriter(w)
	for {
		if err := context.Cause(ctx); err != nil {
			return res, err
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return res, tw.Close()
		}
		if err != nil {
			return res, readError(err)
		}
		if err := plainEntry(ctx, tw, h, tr, &res); err != nil {
			return res, err
		}
	}
}

func plainEntry(ctx context.Context, tw *tar.Writer, h *tar.Header, r io.Reader, res *Result) error {
	if _, err := localName(h.Name); err != nil {
		return err
	}
	out := &tar.Header{
		Typeflag: h.Typeflag, Name: h.Name, Linkname: h.Linkname, Mode: h.Mode & 0o1777,
		Uid: h.Uid, Gid: h.Gid, ModTime: h.ModTime, Format: tar.FormatPAX,
	}
	var pieces []piece
	switch h.Typeflag {
	case tar.TypeReg:
		var err error
		if pieces, out.Size, err = described(h); err != nil {
			return err
		}
	case tar.TypeLink:
		if _, err := localName(h.Linkname); err != nil {
			return err
		}
	case tar.TypeDir, tar.TypeSymlink:
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		res.Skipped++
		return nil
	default:
		return errdefs.New(errdefs.Invalid, "archive entry %q: unknown type %q", h.Name, h.Typeflag)
	}
	if err := tw.WriteHeader(out); err != nil {
		return err
	}
	res.Files++
	res.Bytes += uint64(h.Size)
	at := int64(0)
	for _, d := range append(pieces, piece{off: out.Size}) {
		if err := copyExactly(ctx, tw, zeros{}, d.off-at); err != nil {
			return err
		}
		if err := copyExactly(ctx, tw, r, d.len); err != nil {
			return err
		}
		at = d.off + d.len
	}
	return nil
}

// copyExactly copies n bytes, until ctx ends.
func copyExactly(ctx context.Context, w io.Writer, r io.Reader, n int64) error {
	for n > 0 {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		piece := min(n, chunk)
		if _, err := io.CopyN(w, r, piece); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return readError(io.ErrUnexpectedEOF)
		} else if err != nil {
			return err
		}
		n -= piece
	}
	return nil
}

// zeros reads as zeros without end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
