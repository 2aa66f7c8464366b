//go:build linux

package interfaces

import (
	"fmt"
	"net/netip"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Parse takes what the host said apart; INVALID for what is no setting. Nothing said is
// an empty setting, without a MAC.
func Parse(d *agentv1.NetworkDevice) (Setting, error) {
	s := Setting{MAC: d.GetMac(), MTU: int(d.GetMtu())}
	bad := func(err error) error { return errdefs.As(errdefs.Invalid, fmt.Errorf("network: %w", err)) }
	for _, text := range d.GetAddresses() {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return s, bad(err)
		}
		s.Addresses = append(s.Addresses, p)
	}
	for _, list := range []struct {
		from []string
		to   *[]netip.Addr
	}{{d.GetGateways(), &s.Gateways}, {d.GetNameservers(), &s.Nameservers}} {
		for _, text := range list.from {
			addr, err := netip.ParseAddr(text)
			if err != nil {
				return s, bad(err)
			}
			*list.to = append(*list.to, addr)
		}
	}
	return s, nil
}
