// Package crowd counts connections and keeps their number within bounds: of the
// clients of a server, and into each of several machines. It makes none itself.
package crowd

import (
	"net"
	"net/http"
	"sync"
	"time"
)

// maxSurplus are held beyond the limit for as long as it takes to refuse them.
const maxSurplus = 200

// Clients keeps the number of clients' connections within bounds.
type Clients struct {
	limit int

	mu sync.Mutex
	// since is when a connection became idle; zero while it is used.
	since map[net.Conn]time.Time
}

// NewClients returns a count with a limit, at which the connection that is idle
// longest makes place.
func NewClients(limit int) *Clients { return &Clients{limit: limit, since: map[net.Conn]time.Time{}} }

// Changed is the server's ConnState.
func (c *Clients) Changed(conn net.Conn, state http.ConnState) {
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
func (c *Clients) makeRoom(newest net.Conn) {
	if len(c.since) <= c.limit {
		return
	}
	var oldest net.Conn
	for conn, since := range c.since {
		if !since.IsZero() && (oldest == nil || since.Before(c.since[oldest])) {
			oldest = conn
		}
	}
	if oldest == nil && len(c.since) > c.limit+maxSurplus {
		oldest = newest
	}
	if oldest != nil {
		delete(c.since, oldest)
		_ = oldest.Close() // its server sees the end
	}
}

// Full reports whether there are more connections than are served.
func (c *Clients) Full() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.since) > c.limit
}

// Seats counts connections into machines, by machine.
type Seats struct {
	mu    sync.Mutex
	taken map[string]int
}

// NewSeats returns a count of none.
func NewSeats() *Seats { return &Seats{taken: map[string]int{}} }

// Take takes a place in a machine, unless so many as the limit are taken.
func (s *Seats) Take(machineID string, limit int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[machineID] >= limit {
		return false
	}
	s.taken[machineID]++
	return true
}

// Leave gives it back.
func (s *Seats) Leave(machineID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[machineID]--; s.taken[machineID] == 0 {
		delete(s.taken, machineID)
	}
}
