//go:build linux

package agent

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"sync/atomic"
)

// conversations marks each conversation that l yields with its end, so that a
// handler can tell the end of its stream from the end of everything.
type conversations struct{ net.Listener }

// Accept waits for the next conversation.
func (l conversations) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &conversation{Conn: c}, nil
}

// conversation notes that it has ended before the server learns it, and hence
// before the contexts of its calls end.
type conversation struct {
	net.Conn
	over atomic.Bool
}

// Read is that of the connection.
func (c *conversation) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.note(err)
	return n, err
}

// Write is that of the connection.
func (c *conversation) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.note(err)
	return n, err
}

// Close is that of the connection.
func (c *conversation) Close() error {
	c.over.Store(true)
	return c.Conn.Close()
}

func (c *conversation) note(err error) {
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		c.over.Store(true)
	}
}

// LocalAddr is how a handler finds its conversation: the server puts it into
// the contexts of calls (http.LocalAddrContextKey).
func (c *conversation) LocalAddr() net.Addr { return end{c.Conn.LocalAddr(), c} }

type end struct {
	net.Addr
	of *conversation
}

// conversationOver reports whether the whole conversation that ctx's call came
// in has ended. It is false for a call that came otherwise.
func conversationOver(ctx context.Context) bool {
	e, ok := ctx.Value(http.LocalAddrContextKey).(end)
	return ok && e.of.over.Load()
}
