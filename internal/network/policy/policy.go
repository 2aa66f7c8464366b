// Package policy decides where a machine may connect to: by protocol, address
// and port, and never by a name. It does no I/O: which addresses are the host's
// and which ones a listed name has are given to it.
package policy

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Mode is how far the network of a machine reaches.
type Mode string

// The modes. None means that there is no network; Internet is public addresses
// only; Open is private ones as well. The host's own are in neither.
const (
	None     Mode = "none"
	Internet Mode = "internet"
	Open     Mode = "open"
)

// Reason is why a destination is refused, in a word or two for people. The empty one
// means that it is allowed.
type Reason string

// The reasons. NotListed is what an allow list does not name, Rebinding a name
// whose addresses are refused, Limit and Queries what is too much at the same time.
const (
	Host          Reason = "address of the host"
	Metadata      Reason = "metadata service"
	Unspecified   Reason = "unspecified"
	Loopback      Reason = "loopback"
	LinkLocal     Reason = "link-local"
	Broadcast     Reason = "broadcast"
	Multicast     Reason = "multicast"
	Private       Reason = "private"
	Documentation Reason = "documentation"
	Benchmark     Reason = "benchmark"
	Reserved      Reason = "reserved"
	NotListed     Reason = "not listed"
	Rebinding     Reason = "name of a refused address"
	Limit         Reason = "too many connections"
	Queries       Reason = "too many queries"
	Protocol      Reason = "protocol"
)

// The protocols that have a way out.
const (
	TCP = "tcp"
	UDP = "udp"
)

// Policy is the network setting of a machine, as a user gives it and as it is
// kept with each checkpoint.
type Policy struct {
	Mode Mode `json:"mode"`
	// Allow, not empty, is all that can be reached, within what Mode allows:
	// each HOST or HOST:PORT, where HOST is a name or an address (an IPv6 one
	// with a port in brackets).
	Allow []string `json:"allow,omitempty"`
	// AllowHost are the TCP and UDP ports at which the host's own addresses can
	// be reached.
	AllowHost []int `json:"allow_host,omitempty"`
}

// maxList bounds each list of a policy.
const maxList = 256

// Rules is a policy that was checked and taken apart. It never changes.
type Rules struct {
	mode   Mode
	listed bool
	addrs  []destination
	names  map[string][]uint16
	ports  []uint16
	blocks []block
}

// destination is a listed address; port 0 is any.
type destination struct {
	addr netip.Addr
	port uint16
}

// Compile checks the policy (INVALID says what is wrong and what to do). A
// listed address that the mode refuses is an error: listing it would not help.
func (p Policy) Compile() (Rules, error) {
	r := Rules{mode: p.Mode, listed: len(p.Allow) > 0, names: make(map[string][]uint16), blocks: ranges()}
	switch {
	case p.Mode != None && p.Mode != Internet && p.Mode != Open:
		return Rules{}, errdefs.New(errdefs.Invalid, "network %q: use none, internet or open", p.Mode)
	case p.Mode == None && len(p.Allow)+len(p.AllowHost) > 0:
		return Rules{}, errdefs.New(errdefs.Invalid, "network none allows nothing: use --network internet or open with --allow and --allow-host")
	case len(p.Allow) > maxList || len(p.AllowHost) > maxList:
		return Rules{}, errdefs.New(errdefs.Invalid, "network: %d destinations and %d ports of the host are listed, at most %d each", len(p.Allow), len(p.AllowHost), maxList)
	}
	for _, port := range p.AllowHost {
		if port == 53 {
			return Rules{}, errdefs.New(errdefs.Invalid, "allow-host 53: the machine's own name server answers there; let the host's listen at another port")
		}
		if port < 1 || port > 65535 {
			return Rules{}, errdefs.New(errdefs.Invalid, "allow-host %d: give a port from 1 to 65535", port)
		}
		r.ports = append(r.ports, uint16(port))
	}
	for _, entry := range p.Allow {
		if err := r.list(entry); err != nil {
			return Rules{}, err
		}
	}
	return r, nil
}

// list adds one entry of Allow.
func (r *Rules) list(entry string) error {
	host, port, err := split(entry)
	if err != nil {
		return err
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		if why := r.within(addr); why != "" {
			return errdefs.New(errdefs.Invalid, "allow %q: --network %s refuses it (%s); %s", entry, r.mode, why, remedy(why))
		}
		r.addrs = append(r.addrs, destination{addr.Unmap().WithZone(""), port})
		return nil
	}
	name, ok := Canonical(host)
	if !ok {
		return errdefs.New(errdefs.Invalid, "allow %q: give a name or an address, with :PORT or without", entry)
	}
	r.names[name] = append(r.names[name], port)
	return nil
}

func remedy(why Reason) string {
	if why == Private {
		return "use --network open"
	}
	return "leave it out; a port of the host is allowed by --allow-host"
}

// split takes HOST[:PORT] apart; port 0 is none.
func split(entry string) (host string, port uint16, err error) {
	if _, err := netip.ParseAddr(entry); err == nil {
		return entry, 0, nil
	}
	host, digits, found := entry, "", false
	if i := strings.LastIndexByte(entry, ':'); i >= 0 {
		host, digits, found = entry[:i], entry[i+1:], true
	}
	if found {
		n, err := strconv.ParseUint(digits, 10, 16)
		if err != nil || n == 0 {
			return "", 0, errdefs.New(errdefs.Invalid, "allow %q: the port must be a number from 1 to 65535", entry)
		}
		port = uint16(n)
	}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		host, ok = strings.CutSuffix(inner, "]")
		if a, err := netip.ParseAddr(host); !ok || err != nil || !a.Is6() {
			return "", 0, errdefs.New(errdefs.Invalid, "allow %q: brackets are for an IPv6 address", entry)
		}
	}
	return host, port, nil
}

// Canonical is a name as it is compared: lower case, without the last dot. ok is
// false for what no host is called, such as an address.
func Canonical(name string) (canonical string, ok bool) {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if name == "" || len(name) > 253 {
		return "", false
	}
	digits := true
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 || strings.HasPrefix(label, "-") || strings.HasSuffix(label, "-") {
			return "", false
		}
		if strings.ContainsFunc(label, func(c rune) bool {
			return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_'
		}) {
			return "", false
		}
		digits = !strings.ContainsFunc(label, func(c rune) bool { return c < '0' || c > '9' })
	}
	return name, !digits // a name that ends in a number is an address in disguise
}

// World is what a decision needs to know of the world outside.
type World interface {
	// IsHost reports whether the address is one of the host's own.
	IsHost(a netip.Addr) bool
	// IsBroadcast reports whether packets to the address go to more than one host.
	IsBroadcast(a netip.Addr) bool
	// HasName reports whether the address is one that the listed name has.
	HasName(a netip.Addr, name string) bool
}

// Decide says why a machine with these rules may not send to the address by the
// protocol, or "" if it may.
func (r Rules) Decide(w World, protocol string, to netip.AddrPort) Reason {
	addr := to.Addr().Unmap().WithZone("")
	if protocol != TCP && protocol != UDP {
		return Protocol
	}
	if why := r.Address(w, addr); why == Host && slices.Contains(r.ports, to.Port()) {
		return ""
	} else if why != "" {
		return why
	}
	if !r.listed {
		return ""
	}
	for _, d := range r.addrs {
		if d.addr == addr && (d.port == 0 || d.port == to.Port()) {
			return ""
		}
	}
	for name, ports := range r.names {
		if (slices.Contains(ports, 0) || slices.Contains(ports, to.Port())) && w.HasName(addr, name) {
			return ""
		}
	}
	return NotListed
}

// Address says why the address is refused at every port, but for Host, whose
// ports can be allowed. Lists are not looked at: it is what a name may resolve to.
func (r Rules) Address(w World, a netip.Addr) Reason {
	a = a.Unmap().WithZone("")
	switch r.classify(a) {
	case Metadata, Unspecified, Loopback, LinkLocal, Broadcast, Multicast:
		return r.classify(a) // whoever has it: no allowed port opens these
	}
	inner, ok := embedded(a)
	switch {
	case w.IsBroadcast(a) || ok && w.IsBroadcast(inner):
		return Broadcast // of a subnet of the host's
	case w.IsHost(a) || ok && w.IsHost(inner):
		return Host
	}
	return r.within(a)
}

// within says why the mode refuses the address, whoever has it.
func (r Rules) within(a netip.Addr) Reason {
	why := r.classify(a)
	if why == Private && r.mode == Open {
		return ""
	}
	return why
}

// Lists reports whether the name may be resolved: any may unless there is an
// allow list. pin is whether its addresses count as the name's from then on.
func (r Rules) Lists(name string) (allowed, pin bool) {
	_, pin = r.names[name]
	return pin || !r.listed, pin
}

// Names gives the listed names, sorted.
func (r Rules) Names() []string {
	var names []string
	for name := range r.names {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// HostPort reports whether the port of the host may be reached.
func (r Rules) HostPort(port uint16) bool { return slices.Contains(r.ports, port) }
