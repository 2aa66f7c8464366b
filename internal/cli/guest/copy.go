package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/tarstream"
)

// Copy is one copy between this host and a machine.
type Copy struct {
	Machine string
	// Host and Guest are paths; what they may be is up to package tarstream.
	Host, Guest string
	// Moved, which may be nil, is told how many bytes have gone by.
	Moved func(total int64)
}

// Upload copies from the host into the machine.
func (o Copy) Upload(ctx context.Context, c *client.Client) (tarstream.Result, error) {
	return o.upload(ctx, c, true, func(ctx context.Context, w io.Writer) error { return tarstream.Pack(ctx, w, o.Host) })
}

func (o Copy) upload(ctx context.Context, c *client.Client, rename bool, pack func(context.Context, io.Writer) error) (tarstream.Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream := c.Guest.Upload(ctx)
	out := &uploadWriter{copy: o, send: stream.Send}
	err := out.start(rename)
	if err == nil {
		err = pack(ctx, out)
	}
	if err != nil && out.err == nil {
		// Ours: the machine must not take what came for all of it.
		cancel()
		_, _ = stream.CloseAndReceive() // it was called off
		return tarstream.Result{}, here(err)
	}
	res, err := stream.CloseAndReceive()
	if err != nil {
		return tarstream.Result{}, o.there(err)
	}
	if out.err != nil {
		return tarstream.Result{}, out.err
	}
	return tarstream.Result{Files: res.Msg.GetFiles(), Bytes: res.Msg.GetBytes()}, nil
}

// UploadTar unpacks the archive r below the folder in the machine.
func (o Copy) UploadTar(ctx context.Context, c *client.Client, r io.Reader) (tarstream.Result, error) {
	return o.upload(ctx, c, false, func(_ context.Context, w io.Writer) error {
		_, err := io.CopyBuffer(w, struct{ io.Reader }{r}, make([]byte, tarChunk))
		return err
	})
}

// tarChunk is the largest piece of an archive sent at once, in bytes.
const tarChunk = 256 << 10

// uploadWriter sends what is written, one message a write.
type uploadWriter struct {
	copy  Copy
	send  func(*holdpointv1.GuestUploadRequest) error
	total int64
	// err is the stream's; its reason comes with the answer.
	err error
}

func (u *uploadWriter) start(rename bool) error {
	u.err = u.send(&holdpointv1.GuestUploadRequest{
		Machine: u.copy.Machine,
		Message: &agentv1.UploadRequest{Message: &agentv1.UploadRequest_Start{
			Start: &agentv1.UploadStart{Path: u.copy.Guest, Rename: rename},
		}},
	})
	return u.err
}

func (u *uploadWriter) Write(p []byte) (int, error) {
	u.err = u.send(&holdpointv1.GuestUploadRequest{
		Message: &agentv1.UploadRequest{Message: &agentv1.UploadRequest_Data{Data: p}},
	})
	if u.err != nil {
		return 0, u.err
	}
	u.total += int64(len(p))
	if u.copy.Moved != nil {
		u.copy.Moved(u.total)
	}
	return len(p), nil
}

// Download copies from the machine to the host. Files belong to the caller,
// whoever owned them there.
func (o Copy) Download(ctx context.Context, c *client.Client) (tarstream.Result, error) {
	return o.download(ctx, c, func(in io.Reader) (tarstream.Result, error) {
		return tarstream.UnpackAs(ctx, in, o.Host, tarstream.Options{})
	})
}

// DownloadTar writes what it copies to w as an archive.
func (o Copy) DownloadTar(ctx context.Context, c *client.Client, w io.Writer) (tarstream.Result, error) {
	return o.download(ctx, c, func(in io.Reader) (tarstream.Result, error) { return tarstream.Plain(ctx, w, in) })
}

func (o Copy) download(ctx context.Context, c *client.Client, unpack func(io.Reader) (tarstream.Result, error)) (tarstream.Result, error) {
	stream, err := c.Guest.Download(ctx, connect.NewRequest(&holdpointv1.GuestDownloadRequest{Machine: o.Machine, Path: o.Guest}))
	if err != nil {
		return tarstream.Result{}, err
	}
	defer stream.Close()
	in := &downloadReader{copy: o, stream: stream}
	result, err := unpack(in)
	if in.err != nil && !errors.Is(in.err, io.EOF) {
		return result, o.there(in.err) // the reason why the archive ended
	}
	return result, here(err)
}

// here and there say on which side packing or unpacking has failed; other errors
// say what they are about.
func here(err error) error { return sided("on this host", err) }

func (o Copy) there(err error) error { return sided("in machine "+o.Machine, err) }

func sided(where string, err error) error {
	if err == nil || !strings.HasPrefix(err.Error(), "pack ") && !strings.HasPrefix(err.Error(), "unpack") {
		return err
	}
	return fmt.Errorf("cp %s: %w", where, err)
}

// downloadReader reads the messages of a download as one stream.
type downloadReader struct {
	copy   Copy
	stream *connect.ServerStreamForClient[agentv1.DownloadResponse]
	data   []byte
	total  int64
	err    error
}

func (d *downloadReader) Read(p []byte) (int, error) {
	for len(d.data) == 0 {
		if d.err != nil {
			return 0, d.err
		}
		if !d.stream.Receive() {
			if d.err = d.stream.Err(); d.err == nil {
				d.err = io.EOF
			}
			return 0, d.err
		}
		d.data = d.stream.Msg().GetData()
	}
	n := copy(p, d.data)
	d.data = d.data[n:]
	d.total += int64(n)
	if d.copy.Moved != nil {
		d.copy.Moved(d.total)
	}
	return n, nil
}
