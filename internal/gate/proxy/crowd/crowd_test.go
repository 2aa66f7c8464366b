package crowd

import (
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// client is a connection whose other end is read until it is closed.
func client() (conn net.Conn, closed <-chan struct{}) {
	near, far := net.Pipe()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, far)
	}()
	return near, ended
}

func isClosed(closed <-chan struct{}) bool {
	synctest.Wait()
	select {
	case <-closed:
		return true
	default:
		return false
	}
}

func TestClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewClients(2)
		var conns []net.Conn
		var closed []<-chan struct{}
		enter := func(state http.ConnState) {
			conn, ended := client()
			conns, closed = append(conns, conn), append(closed, ended)
			c.Changed(conn, http.StateNew)
			c.Changed(conn, http.StateActive)
			c.Changed(conn, state)
			time.Sleep(time.Second)
		}
		enter(http.StateIdle)
		enter(http.StateIdle)
		c.Changed(conns[0], http.StateActive)
		c.Changed(conns[0], http.StateIdle) // 1 is idle for longer now
		enter(http.StateIdle)
		if isClosed(closed[0]) || !isClosed(closed[1]) || isClosed(closed[2]) {
			t.Error("not the one that was idle longest made place")
		}
		c.Changed(conns[0], http.StateActive)
		c.Changed(conns[2], http.StateActive)
		if c.Full() {
			t.Error("two of two are more than are served")
		}
		for range maxSurplus { // to be refused in words
			enter(http.StateActive)
		}
		if !c.Full() || isClosed(closed[len(closed)-1]) {
			t.Error("no place to refuse a client in")
		}
		enter(http.StateActive)
		if !isClosed(closed[len(closed)-1]) || isClosed(closed[0]) {
			t.Error("beyond that the newest goes")
		}
		for _, conn := range conns {
			c.Changed(conn, http.StateClosed)
			if err := conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
		}
		if len(c.since) != 0 {
			t.Error(len(c.since), "are left")
		}
	})
}

func TestSeats(t *testing.T) {
	s := NewSeats()
	for i, want := range []bool{true, true, false} {
		if got := s.Take("a", 2); got != want {
			t.Errorf("taken %d times: %v", i+1, got)
		}
	}
	if !s.Take("b", 2) {
		t.Error("another machine's seats count")
	}
	s.Leave("a")
	if !s.Take("a", 2) || s.Take("a", 2) {
		t.Error("one seat was free again")
	}
	s.Leave("a")
	s.Leave("a")
	s.Leave("b")
	if len(s.taken) != 0 {
		t.Error(s.taken)
	}
}
