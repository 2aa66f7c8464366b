//go:build linux

// Package conversation lets the handler of a call tell the end of its own
// stream, which its user closed, from the end of the whole conversation that it
// came in. It does not know what is said, nor how conversations begin (package
// link).
package conversation

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"sync/atomic"
)

// Listen makes Over know the conversations that l yields, when an http.Server
// serves them. The returned listener is l's and closes it.
func Listen(l net.Listener) net.Listener { return listener{l} }

type listener struct{ net.Listener }

// Accept waits for the next conversation.
func (l listener) Accept() (net.Conn, error) {
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

// Over reports whether the whole conversation that the call with this context
// came in has ended. Where the end of the conversation is why the context
// ended, it says so. It is false for a call that came otherwise.
func Over(ctx context.Context) bool {
	e, ok := ctx.Value(http.LocalAddrContextKey).(end)
	return ok && e.of.over.Load()
}
