package link

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"time"
)

// Host begins a conversation on conn, a fresh connection to the machine's end
// of the agent link. It returns when the guest has answered; ctx bounds that.
// A guest that still boots answers when its agent has come up. On error conn
// is closed. The returned connection is conn's and closes it.
func Host(ctx context.Context, conn net.Conn, magic Magic) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	rest, err := greet(conn, magic)
	if err == nil && !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = conn.Close()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("begin a conversation with the guest agent: %w", err)
	}
	return &hostConn{Conn: conn, rest: rest}, nil
}

// greet says hello and discards until the answer. It returns what came after.
func greet(conn net.Conn, magic Magic) ([]byte, error) {
	hello := make([]byte, helloLen)
	copy(hello, magic[:])
	_, _ = rand.Read(hello[magicLen:]) // never fails, see crypto/rand
	// What the guest sends meanwhile must be read, or both sides may wait for
	// each other with their buffers full.
	wrote := make(chan error, 1)
	go func() {
		_, err := conn.Write(hello)
		wrote <- err
	}()
	rest, err := discardUntil(conn, hello)
	if err != nil {
		_ = conn.SetWriteDeadline(time.Unix(1, 0))
	}
	if werr := <-wrote; err == nil {
		err = werr
	}
	return rest, err
}

func discardUntil(conn net.Conn, hello []byte) ([]byte, error) {
	scan := newScanner(hello)
	buf := make([]byte, 64<<10)
	for {
		n, err := conn.Read(buf)
		if end := scan.scan(buf[:n]); end >= 0 {
			return append([]byte(nil), buf[end:n]...), nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// hostConn is a conversation at the host: what was read along with the
// guest's answer, then the connection.
type hostConn struct {
	net.Conn
	rest []byte
}

func (c *hostConn) Read(p []byte) (int, error) {
	if len(c.rest) > 0 {
		n := copy(p, c.rest)
		c.rest = c.rest[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}
