package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
)

// ServeConfig is what the guest's end of the link serves.
type ServeConfig struct {
	Handler http.Handler
	// Log gets what HTTP/2 complains about; nil discards it.
	Log *slog.Logger
}

// Serve serves HTTP/2 in each conversation that l yields, until ctx ends or l
// fails. It waits for the handlers it called. It closes l.
func Serve(ctx context.Context, l net.Listener, cfg ServeConfig) error {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	var handlers sync.WaitGroup
	srv := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			handlers.Add(1)
			defer handlers.Done()
			r.Body = &wholeReader{ReadCloser: r.Body}
			w.Header()["Date"] = nil // nobody reads it, and to write it takes a guest's time
			bw := &wholeWriter{ResponseWriter: w}
			defer bw.flush()
			cfg.Handler.ServeHTTP(bw, r)
		}),
		Protocols:   protocols,
		HTTP2:       HTTP2(),
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	if cfg.Log != nil {
		srv.ErrorLog = slog.NewLogLogger(cfg.Log.Handler(), slog.LevelWarn)
	}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	err := srv.Serve(l)
	stop()
	_ = srv.Close()
	handlers.Wait()
	if ctx.Err() != nil || errors.Is(err, http.ErrServerClosed) {
		return context.Cause(ctx)
	}
	return fmt.Errorf("serve the agent link: %w", err)
}

// wholeWriter gathers what is written between two flushes, so that a message
// and what frames it become one HTTP/2 frame and one write to the port.
type wholeWriter struct {
	http.ResponseWriter
	buf []byte
}

const wholeWriterLimit = 512 << 10

// Write gathers p.
func (w *wholeWriter) Write(p []byte) (int, error) {
	if len(w.buf)+len(p) > wholeWriterLimit {
		if err := w.flush(); err != nil {
			return 0, err
		}
		if len(p) > wholeWriterLimit {
			return w.ResponseWriter.Write(p)
		}
	}
	w.buf = Append(w.buf, p)
	return len(p), nil
}

func (w *wholeWriter) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	_, err := w.ResponseWriter.Write(w.buf)
	w.buf = w.buf[:0]
	return err
}

// FlushError sends what was gathered.
func (w *wholeWriter) FlushError() error {
	if err := w.flush(); err != nil {
		return err
	}
	return http.NewResponseController(w.ResponseWriter).Flush()
}

// Flush sends what was gathered.
func (w *wholeWriter) Flush() { _ = w.FlushError() }

// Unwrap gives http.ResponseController the writer below.
func (w *wholeWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// wholeReader reads a request in large pieces: HTTP/2 answers each read with a
// window update of its own, which is a write to the port.
type wholeReader struct {
	io.ReadCloser
	buffer Buffer
	rest   []byte
}

// Unbuffered gives the rest of the request to a reader of its own, which reads
// large pieces itself. The wholeReader must not be read from then on.
func (r *wholeReader) Unbuffered() io.Reader {
	return io.MultiReader(bytes.NewReader(r.rest), r.ReadCloser)
}

// Read reads what is there.
func (r *wholeReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		piece, err := r.buffer.Read(r.ReadCloser)
		if len(piece) == 0 {
			return 0, err
		}
		r.rest = piece // an error comes again
	}
	n := Copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}
