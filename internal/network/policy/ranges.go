package policy

import "net/netip"

// ranges gives what the reserved blocks are, the narrower before the wider. The
// blocks are those of IANA's special-purpose registries (RFC 6890 and its
// updates), and the addresses at which clouds hand credentials to whoever asks.
func ranges() []block {
	of := func(r Reason, prefixes ...string) (blocks []block) {
		for _, p := range prefixes {
			blocks = append(blocks, block{netip.MustParsePrefix(p), r})
		}
		return blocks
	}
	var all []block
	for _, blocks := range [][]block{
		of(Metadata, "169.254.169.254/32", "169.254.170.2/32", "168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32", "fd00:ec2::/32", "fd20:ce::254/128"),
		of(Unspecified, "0.0.0.0/8", "::/128"),
		of(Loopback, "127.0.0.0/8", "::1/128"),
		of(LinkLocal, "169.254.0.0/16", "fe80::/10"),
		of(Broadcast, "255.255.255.255/32"),
		of(Multicast, "224.0.0.0/4", "ff00::/8"),
		of(Private, "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"),
		of(Documentation, "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"),
		of(Benchmark, "198.18.0.0/15", "2001:2::/48"),
		of(Reserved, "192.0.0.0/24", "192.88.99.0/24", "240.0.0.0/4", "2001::/23"),
	} {
		all = append(all, blocks...)
	}
	return all
}

type block struct {
	prefix netip.Prefix
	reason Reason
}

// classify says in which reserved block the address is, and "" for one that is
// public. An address with another one inside is what the inner one is, too.
func (r Rules) classify(a netip.Addr) Reason {
	a = a.Unmap().WithZone("")
	inner, embeds := embedded(a)
	if embeds {
		if why := r.classify(inner); why != "" {
			return why
		}
	}
	for _, b := range r.blocks {
		if b.prefix.Contains(a) {
			return b.reason
		}
	}
	if !a.Is4() && !embeds && !netip.MustParsePrefix("2000::/3").Contains(a) {
		return Reserved
	}
	return ""
}

// embedded gives the IPv4 address to which a relay would take the packet: that
// in a NAT64 (RFC 6052), 6to4 (RFC 3056) or ISATAP (RFC 5214) address. Teredo,
// which is in 2001::/23, and local NAT64 prefixes are reserved as a whole.
func embedded(a netip.Addr) (inner netip.Addr, ok bool) {
	if a.Is4() {
		return netip.Addr{}, false
	}
	b := a.As16()
	four := func(at int) (netip.Addr, bool) { return netip.AddrFrom4([4]byte(b[at : at+4])), true }
	switch {
	case netip.MustParsePrefix("64:ff9b::/96").Contains(a):
		return four(12)
	case netip.MustParsePrefix("2002::/16").Contains(a):
		return four(2)
	case b[8]&^2 == 0 && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe:
		return four(12)
	}
	return netip.Addr{}, false
}
