package proxy

import (
	"errors"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	// maxClients is how many connections of clients are served. The idle one
	// that waits longest makes place for a new one.
	maxClients = 2000
	// maxSurplus are held besides for as long as it takes to refuse them.
	maxSurplus = 200
)

// crowd keeps the number of clients' connections within bounds.
type crowd struct {
	max int

	mu sync.Mutex
	// since is when a connection became idle; zero while it is used.
	since map[net.Conn]time.Time
}

func newCrowd(limit int) *crowd { return &crowd{max: limit, since: map[net.Conn]time.Time{}} }

// changed is the server's ConnState.
func (c *crowd) changed(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch state {
	case http.StateNew:
		c.since[conn] = time.Time{}
		c.makeRoom(conn)
	case http.StateIdle:
		c.since[conn] = time.Now()
	case http.StateActive:
		if _, known := c.since[conn]; known {
			c.since[conn] = time.Time{}
		}
	case http.StateClosed, http.StateHijacked:
		delete(c.since, conn)
	}
}

// makeRoom closes the connection that is idle longest when there are too many,
// and the new one when there are far too many and all are used.
func (c *crowd) makeRoom(newest net.Conn) {
	if len(c.since) <= c.max {
		return
	}
	var oldest net.Conn
	for conn, since := range c.since {
		if !since.IsZero() && (oldest == nil || since.Before(c.since[oldest])) {
			oldest = conn
		}
	}
	if oldest == nil && len(c.since) > c.max+maxSurplus {
		oldest = newest
	}
	if oldest != nil {
		delete(c.since, oldest)
		_ = oldest.Close() // its server sees the end
	}
}

// full reports whether there are more connections than are served.
func (c *crowd) full() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.since) > c.max
}

// seats counts connections into machines, by machine.
type seats struct {
	mu    sync.Mutex
	taken map[string]int
}

// take takes a place in a machine, unless max are taken.
func (s *seats) take(machineID string, limit int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[machineID] >= limit {
		return false
	}
	s.taken[machineID]++
	return true
}

func (s *seats) leave(machineID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[machineID]--; s.taken[machineID] == 0 {
		delete(s.taken, machineID)
	}
}

// errFull means that a machine has as many connections as it may.
var errFull = errors.New("too many connections into the machine")
