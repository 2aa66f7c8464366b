// Package names is the DNS server of a machine's link: it asks the host's name
// servers, leaves out addresses that the machine may not reach, and remembers
// those of listed names. It caches nothing and decides on no connection.
package names

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// Host is what is asked, and whose addresses are not given out.
type Host interface {
	IsHost(a netip.Addr) bool
	IsBroadcast(a netip.Addr) bool
	Dial(ctx context.Context, protocol string, to netip.AddrPort) (net.Conn, error)
	Nameservers() []netip.AddrPort
}

// Config is what a server needs.
type Config struct {
	Rules policy.Rules
	Host  Host
	// HostName is the name that the gateways have.
	HostName string
	Gateways []netip.Addr
	// Refused is told of each name that the guest has asked for and that is not
	// resolved, or not to all its addresses; what is one of these, or "".
	Refused func(name string, why policy.Reason, what string)
}

const (
	// maxMessage is the most that a DNS message may have, in bytes.
	maxMessage = 65535
	// maxQuery is the most that a query may have: one question, and options.
	maxQuery = 4096
	// maxPinned bounds the addresses remembered for one name; the oldest go first.
	maxPinned = 1024
	// concurrent bounds the queries under way.
	concurrent = 128
	// timeout bounds one server's answer. Clients ask again after five seconds.
	timeout = 2 * time.Second
	// idle ends a stream without a query.
	idle     = 30 * time.Second
	answerOf = 60 // seconds for which the host's name is good
)

// Server answers queries. Its methods may be called at the same time.
type Server struct {
	cfg  Config
	busy chan struct{}

	mu     sync.Mutex
	pinned map[string][]netip.Addr
}

// New makes a server, which has pinned nothing yet.
func New(cfg Config) *Server {
	return &Server{cfg: cfg, busy: make(chan struct{}, concurrent), pinned: make(map[string][]netip.Addr)}
}

// IsHost makes a Server what policy decides by.
func (s *Server) IsHost(a netip.Addr) bool { return s.cfg.Host.IsHost(a) }

// IsBroadcast makes a Server what policy decides by.
func (s *Server) IsBroadcast(a netip.Addr) bool { return s.cfg.Host.IsBroadcast(a) }

// HasName reports whether the address was an answer for the listed name.
func (s *Server) HasName(a netip.Addr, name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.pinned[name], a.Unmap())
}

func (s *Server) pin(name string, a netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	had := slices.DeleteFunc(s.pinned[name], func(b netip.Addr) bool { return a == b })
	if len(had) >= maxPinned {
		had = slices.Delete(had, 0, 1)
	}
	s.pinned[name] = append(had, a)
}

// Prime asks for the addresses of all listed names: a guest that continues from
// a checkpoint may go on with those that it knows. It ends with ctx, or with the
// last answer. Refused is not told: the guest has asked for none of them.
func (s *Server) Prime(ctx context.Context) {
	var asked sync.WaitGroup
	defer asked.Wait()
	for _, name := range s.cfg.Rules.Names() {
		full, err := dnsmessage.NewName(name + ".")
		if err != nil {
			continue // too long a name for any server
		}
		for _, kind := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA} {
			query := dnsmessage.Message{
				Header:    dnsmessage.Header{RecursionDesired: true},
				Questions: []dnsmessage.Question{{Name: full, Type: kind, Class: dnsmessage.ClassINET}},
			}
			packed, err := query.Pack()
			if err == nil {
				asked.Go(func() {
					select {
					case s.busy <- struct{}{}:
						defer func() { <-s.busy }()
						if answer, err := s.ask(ctx, packed, policy.UDP); err == nil {
							_, _, _ = s.filter(answer, name) // which pins them
						}
					case <-ctx.Done():
					}
				})
			}
		}
	}
}

// Answer is the response to a query that came by the protocol; nil for what is
// none. It never waits for other queries: one too many is refused.
func (s *Server) Answer(ctx context.Context, query []byte, protocol string) []byte {
	var p dnsmessage.Parser
	header, err := p.Start(query)
	if err != nil || header.Response || len(query) > maxQuery {
		return nil
	}
	questions, err := p.AllQuestions()
	if err != nil || len(questions) != 1 {
		return reply(header, nil, dnsmessage.RCodeFormatError)
	}
	q := questions[0]
	name := canonical(q.Name)
	switch {
	case header.OpCode != 0:
		return reply(header, &q, dnsmessage.RCodeNotImplemented)
	case name == s.cfg.HostName:
		return s.gateways(header, q)
	}
	if allowed, _ := s.cfg.Rules.Lists(name); !allowed {
		s.cfg.Refused(name, policy.NotListed, "")
		return reply(header, &q, dnsmessage.RCodeNameError)
	}
	select {
	case s.busy <- struct{}{}:
		defer func() { <-s.busy }()
	default:
		s.cfg.Refused(name, policy.Queries, "")
		return reply(header, &q, dnsmessage.RCodeServerFailure)
	}
	answer, err := s.ask(ctx, query, protocol)
	if err != nil {
		return reply(header, &q, dnsmessage.RCodeServerFailure)
	}
	filtered, what, err := s.filter(answer, name)
	if err != nil && truncated(answer) {
		m := message(header, &q, dnsmessage.RCodeSuccess)
		m.Truncated = true // it is asked for again, by TCP
		return packed(m)
	}
	if err != nil {
		return reply(header, &q, dnsmessage.RCodeServerFailure)
	}
	if what != "" {
		s.cfg.Refused(name, policy.Rebinding, what)
	}
	return filtered
}

// canonical is a name as it is compared.
func canonical(n dnsmessage.Name) string { return strings.ToLower(strings.TrimSuffix(n.String(), ".")) }

// truncated reports whether the message says that not all of it is there.
func truncated(m []byte) bool { return len(m) >= headerBytes && m[2]&2 != 0 }

// filter leaves out of an answer the addresses that may not be reached, and
// pins the others to the name that was asked for, if it is a listed one. refused
// is the first address of the name's that was left out, and why.
func (s *Server) filter(answer []byte, name string) (filtered []byte, refused string, err error) {
	var m dnsmessage.Message
	if err := m.Unpack(answer); err != nil {
		return nil, "", err
	}
	_, listed := s.cfg.Rules.Lists(name)
	owners := aliases(m.Answers, name)
	left := ""
	drop := func(r dnsmessage.Resource) bool {
		var a netip.Addr
		switch body := r.Body.(type) {
		case *dnsmessage.AResource:
			a = netip.AddrFrom4(body.A)
		case *dnsmessage.AAAAResource:
			a = netip.AddrFrom16(body.AAAA).Unmap()
		default:
			return false
		}
		why := s.cfg.Rules.Address(s, a)
		if why == "" && listed && owners[canonical(r.Header.Name)] {
			s.pin(name, a)
		}
		if why != "" && left == "" {
			left = fmt.Sprintf("%s, %s", a, why)
		}
		return why != ""
	}
	m.Answers = slices.DeleteFunc(m.Answers, drop)
	refused, owners = left, nil // what else is told is nobody's address
	m.Authorities = slices.DeleteFunc(m.Authorities, drop)
	m.Additionals = slices.DeleteFunc(m.Additionals, drop)
	if left == "" {
		return answer, "", nil
	}
	filtered, err = m.Pack()
	return filtered, refused, err
}

// aliases are the names that the answers say are the same as the one that was asked
// for, with it.
func aliases(answers []dnsmessage.Resource, name string) map[string]bool {
	owners := map[string]bool{name: true}
	for range answers { // they may be in any order
		before := len(owners)
		for _, r := range answers {
			if alias, ok := r.Body.(*dnsmessage.CNAMEResource); ok && owners[canonical(r.Header.Name)] {
				owners[canonical(alias.CNAME)] = true
			}
		}
		if len(owners) == before {
			break
		}
	}
	return owners
}

// gateways answers for the host's name.
func (s *Server) gateways(header dnsmessage.Header, q dnsmessage.Question) []byte {
	m := message(header, &q, dnsmessage.RCodeSuccess)
	for _, a := range s.cfg.Gateways {
		var body dnsmessage.ResourceBody
		switch {
		case a.Is4() && q.Type == dnsmessage.TypeA:
			body = &dnsmessage.AResource{A: a.As4()}
		case a.Is6() && q.Type == dnsmessage.TypeAAAA:
			body = &dnsmessage.AAAAResource{AAAA: a.As16()}
		default:
			continue
		}
		h := dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: dnsmessage.ClassINET, TTL: answerOf}
		m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: body})
	}
	return packed(m)
}

// reply is an answer without an answer.
func reply(header dnsmessage.Header, q *dnsmessage.Question, code dnsmessage.RCode) []byte {
	return packed(message(header, q, code))
}

func message(header dnsmessage.Header, q *dnsmessage.Question, code dnsmessage.RCode) dnsmessage.Message {
	m := dnsmessage.Message{Header: dnsmessage.Header{
		ID: header.ID, Response: true, OpCode: header.OpCode, RCode: code,
		RecursionDesired: header.RecursionDesired, RecursionAvailable: true,
	}}
	if q != nil {
		m.Questions = []dnsmessage.Question{*q}
	}
	return m
}

func packed(m dnsmessage.Message) []byte {
	b, err := m.Pack()
	if err != nil {
		return nil // what was parsed is packed
	}
	return b
}

// ServeStream answers the queries of a TCP connection, one after the other, until it
// ends, and closes it.
func (s *Server) ServeStream(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	for {
		_ = conn.SetDeadline(time.Now().Add(idle))
		query, err := readMessage(conn)
		if err != nil {
			return
		}
		answer := s.Answer(ctx, query, policy.TCP)
		if answer == nil || writeMessage(conn, answer) != nil {
			return
		}
	}
}

func readMessage(r io.Reader) ([]byte, error) {
	var length [2]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.BigEndian.Uint16(length[:]))
	_, err := io.ReadFull(r, b)
	return b, err
}

func writeMessage(w io.Writer, m []byte) error {
	if len(m) > maxMessage {
		return io.ErrShortWrite
	}
	_, err := w.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(m))), m...))
	return err
}
