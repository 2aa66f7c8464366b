package names

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

type nowhere struct{}

func (nowhere) IsHost(netip.Addr) bool      { return false }
func (nowhere) IsBroadcast(netip.Addr) bool { return false }
func (nowhere) Dial(context.Context, string, netip.AddrPort) (net.Conn, error) {
	return nil, errors.New("no route")
}
func (nowhere) Nameservers() []netip.AddrPort { return nil }

func server(t testing.TB) *Server {
	t.Helper()
	rules, err := policy.Policy{Mode: policy.Internet, Allow: []string{"listed.example"}}.Compile()
	if err != nil {
		t.Fatal(err)
	}
	return New(Config{Rules: rules, Host: nowhere{}, HostName: "host.test", Refused: func(string, policy.Reason, string) {}})
}

// inside is a host whose name server has private addresses only.
type inside struct{ nowhere }

func (inside) Nameservers() []netip.AddrPort {
	return []netip.AddrPort{netip.MustParseAddrPort("10.0.0.53:53")}
}

func (inside) Dial(context.Context, string, netip.AddrPort) (net.Conn, error) {
	ours, theirs := net.Pipe()
	go func() {
		defer theirs.Close()
		buf := make([]byte, maxMessage)
		n, err := theirs.Read(buf)
		var m dnsmessage.Message
		if err != nil || m.Unpack(buf[:n]) != nil {
			return
		}
		m.Response = true
		for _, last := range []byte{5, 6} {
			h := dnsmessage.ResourceHeader{Name: m.Questions[0].Name, Class: dnsmessage.ClassINET}
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AResource{A: [4]byte{10, 0, 0, last}}})
		}
		_, _ = theirs.Write(packed(m))
	}()
	return ours, nil
}

// TestRefusedIsTold: with the address and what it is, and of what the guest has
// asked for only.
func TestRefusedIsTold(t *testing.T) {
	s := server(t)
	s.cfg.Host = inside{}
	var told []string
	s.cfg.Refused = func(name string, why policy.Reason, what string) {
		told = append(told, fmt.Sprintf("%s: %s: %s", name, why, what))
	}
	s.Prime(t.Context())
	if told != nil {
		t.Errorf("the guest has asked for nothing, and is refused %q", told)
	}
	s.Answer(t.Context(), query(t, "listed.example."), policy.UDP)
	if want := []string{"listed.example: name of a refused address: 10.0.0.5, private"}; !slices.Equal(told, want) {
		t.Errorf("%q, want %q", told, want)
	}
}

func query(t testing.TB, name string) []byte {
	t.Helper()
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 7, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}},
	}
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestAnswers(t *testing.T) {
	q := query(t, "listed.example.")
	reply := bytes.Clone(q)
	reply[2] |= 0x80
	if !answers(reply, q) || !answers(bytes.ReplaceAll(reply, []byte("listed"), []byte("LISTED")), q) {
		t.Error("the answer is none")
	}
	other := bytes.Clone(reply)
	other[0]++
	for what, m := range map[string][]byte{
		"a query": q, "another id": other, "half of one": reply[:20], "nothing": nil,
		"another name": append(bytes.Clone(reply[:2]), query(t, "misted.example.")[2:]...),
	} {
		if answers(m, q) {
			t.Errorf("%s is an answer", what)
		}
	}
}

// TestPinsAreTheNames: what else an answer tells of is not the listed name's.
func TestPinsAreTheNames(t *testing.T) {
	s := server(t)
	record := func(owner string, body dnsmessage.ResourceBody) dnsmessage.Resource {
		return dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(owner), Class: dnsmessage.ClassINET}, Body: body}
	}
	addr := func(last byte) *dnsmessage.AResource { return &dnsmessage.AResource{A: [4]byte{9, 9, 9, last}} }
	alias := func(to string) *dnsmessage.CNAMEResource {
		return &dnsmessage.CNAMEResource{CNAME: dnsmessage.MustNewName(to)}
	}
	m := dnsmessage.Message{
		Header: dnsmessage.Header{Response: true},
		Answers: []dnsmessage.Resource{
			record("Edge.example.", addr(1)), record("cdn.example.", alias("edge.example.")), record("LISTED.example.", alias("cdn.example.")),
			record("listed.example.", addr(2)), record("unrelated.example.", addr(3)),
		},
		Authorities: []dnsmessage.Resource{record("listed.example.", addr(4))},
		Additionals: []dnsmessage.Resource{record("ns.other.test.", addr(5)), record("edge.example.", addr(6))},
	}
	if _, _, err := s.filter(packed(m), "listed.example"); err != nil {
		t.Fatal(err)
	}
	for last, want := range []bool{1: true, 2: true, 3: false, 4: false, 5: false, 6: false} {
		if got := s.HasName(netip.AddrFrom4([4]byte{9, 9, 9, byte(last)}), "listed.example"); got != want {
			t.Errorf("9.9.9.%d: %v", last, got)
		}
	}
}

// silent is a host whose name server never answers; asked is told of each query.
type silent struct {
	inside
	asked chan struct{}
}

func (s silent) Dial(ctx context.Context, _ string, _ netip.AddrPort) (net.Conn, error) {
	s.asked <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestQueriesAreBounded: one too many is refused at once, and holds nothing.
func TestQueriesAreBounded(t *testing.T) {
	s := server(t)
	host := silent{asked: make(chan struct{})}
	s.cfg.Host = host
	refused := 0
	s.cfg.Refused = func(_ string, why policy.Reason, _ string) {
		if why == policy.Queries {
			refused++
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	for range concurrent {
		busy.Go(func() { s.Answer(ctx, query(t, "listed.example."), policy.UDP) })
		<-host.asked
	}
	for range 10 {
		var m dnsmessage.Message
		if err := m.Unpack(s.Answer(ctx, query(t, "listed.example."), policy.UDP)); err != nil || m.RCode != dnsmessage.RCodeServerFailure {
			t.Errorf("%+v, %v", m, err)
		}
	}
	if refused != 10 {
		t.Errorf("%d were refused", refused)
	}
	cancel()
	busy.Wait()
	if answer := s.Answer(t.Context(), append(query(t, "listed.example."), make([]byte, maxQuery)...), policy.UDP); answer != nil {
		t.Errorf("a query that is too long is answered: %q", answer)
	}
}

// TestPinsAreBounded: of the addresses of one name the last are kept.
func TestPinsAreBounded(t *testing.T) {
	s := server(t)
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{1, 1, byte(i >> 8), byte(i)}) }
	for i := range maxPinned + 10 {
		s.pin("listed.example", addr(i))
	}
	if s.HasName(addr(9), "listed.example") || !s.HasName(addr(10), "listed.example") || !s.HasName(addr(maxPinned+9), "listed.example") {
		t.Error("the wrong ones are kept")
	}
}

// FuzzAnswer: a guest's bytes give an answer or none.
func FuzzAnswer(f *testing.F) {
	f.Add(query(f, "listed.example."))
	f.Add(query(f, "host.test."))
	f.Add([]byte{0, 7, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0})
	s := server(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		answer := s.Answer(t.Context(), b, policy.UDP)
		if answer == nil {
			return
		}
		if len(answer) < headerBytes || !bytes.Equal(answer[:2], b[:2]) || answer[2]&0x80 == 0 {
			t.Errorf("%x is no answer to %x", answer, b)
		}
	})
}

// FuzzFilter: a name server's bytes never give out an address that is refused.
func FuzzFilter(f *testing.F) {
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 7, Response: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName("listed.example."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}},
		Answers: []dnsmessage.Resource{
			{Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName("listed.example."), Class: dnsmessage.ClassINET}, Body: &dnsmessage.AResource{A: [4]byte{127, 0, 0, 1}}},
			{Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName("listed.example."), Class: dnsmessage.ClassINET}, Body: &dnsmessage.AAAAResource{AAAA: netip.MustParseAddr("::ffff:10.0.0.1").As16()}},
		},
	}
	b, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	s := server(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		out, _, err := s.filter(b, "listed.example")
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if err := m.Unpack(out); err != nil {
			t.Fatalf("%x: %v", out, err)
		}
		for _, r := range append(m.Answers, m.Additionals...) {
			if a, ok := r.Body.(*dnsmessage.AResource); ok && s.cfg.Rules.Address(s, netip.AddrFrom4(a.A)) != "" {
				t.Errorf("%v was given out", a.A)
			}
		}
	})
}
