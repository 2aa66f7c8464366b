package network

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// maxDestinations is how many refused destinations are kept; the one that was refused
// longest ago goes first.
const maxDestinations = 256

// Refusal is one destination that a machine was refused.
type Refusal struct {
	// Protocol is tcp, udp, icmp or dns.
	Protocol string `json:"protocol"`
	// To is ADDRESS:PORT, an address (icmp) or a name (dns).
	To     string        `json:"to"`
	Reason policy.Reason `json:"reason"`
	// What is the address of a name that was refused last, and why it was; else "".
	What  string `json:"what,omitempty"`
	Count uint64 `json:"count"`
	// Last is when it was refused last, by the host's clock.
	Last time.Time `json:"last"`
}

// Why is the reason for people.
func (r Refusal) Why() string {
	if r.What == "" {
		return string(r.Reason)
	}
	return fmt.Sprintf("%s (%s)", r.Reason, r.What)
}

// Report is what the network of a machine has refused since its New.
type Report struct {
	// Total counts all refusals, Reasons those for each reason.
	Total   uint64                   `json:"total"`
	Reasons map[policy.Reason]uint64 `json:"reasons,omitempty"`
	// Destinations are the last 256 different ones, the last one first.
	Destinations []Refusal `json:"destinations,omitempty"`
}

type refusals struct {
	mu      sync.Mutex
	total   uint64
	reasons map[policy.Reason]uint64
	last    map[refusalKey]*Refusal
}

type refusalKey struct {
	protocol, to string
	reason       policy.Reason
}

func newRefusals() *refusals {
	return &refusals{reasons: make(map[policy.Reason]uint64), last: make(map[refusalKey]*Refusal)}
}

// add counts one refusal; what is Refusal.What.
func (r *refusals) add(protocol, to string, why policy.Reason, what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total++
	r.reasons[why]++
	key := refusalKey{protocol, to, why}
	known := r.last[key]
	if known == nil {
		if len(r.last) >= maxDestinations {
			r.forget()
		}
		known = &Refusal{Protocol: protocol, To: to, Reason: why}
		r.last[key] = known
	}
	known.What = what
	known.Count++
	known.Last = time.Now()
}

// forget drops the destination that was refused longest ago.
func (r *refusals) forget() {
	var oldest refusalKey
	var at time.Time
	for key, known := range r.last {
		if at.IsZero() || known.Last.Before(at) {
			oldest, at = key, known.Last
		}
	}
	delete(r.last, oldest)
}

func (r *refusals) report() Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	report := Report{Total: r.total, Reasons: make(map[policy.Reason]uint64)}
	for why, n := range r.reasons {
		report.Reasons[why] = n
	}
	for _, known := range r.last {
		report.Destinations = append(report.Destinations, *known)
	}
	slices.SortFunc(report.Destinations, func(a, b Refusal) int {
		return cmp.Or(b.Last.Compare(a.Last), cmp.Compare(a.To, b.To))
	})
	return report
}
