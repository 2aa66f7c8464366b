//go:build linux

// Package interfaces gives the guest's network device its addresses, routes and
// name servers, by the host's word: there is one device, nothing is negotiated,
// and nothing is watched afterwards.
package interfaces

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/netlink"
)

// Setting is what a network device is given.
type Setting struct {
	// MAC finds the device.
	MAC string
	// MTU is in bytes; 0 leaves the device's.
	MTU int
	// Addresses have their prefix lengths; Gateways are where the default routes
	// lead, at most one for each family.
	Addresses []netip.Prefix
	Gateways  []netip.Addr
	// Nameservers are for /etc/resolv.conf.
	Nameservers []netip.Addr
}

// Up brings the device up with the setting. NOT_FOUND means that there is no such
// device. It may be repeated.
func Up(s Setting) error {
	index, err := find(s.MAC)
	if err != nil {
		return err
	}
	conn, err := netlink.Open(unix.NETLINK_ROUTE, netlink.Timeout)
	if err != nil {
		return fmt.Errorf("set up network device %s: %w", s.MAC, err)
	}
	defer conn.Close()
	r := routes{conn}
	err = r.up(index, s.MTU)
	for _, p := range s.Addresses {
		err = errors.Join(err, r.addAddress(index, p))
	}
	for _, gateway := range s.Gateways {
		err = errors.Join(err, r.addDefault(index, gateway))
	}
	if err != nil {
		return fmt.Errorf("set up network device %s: %w", s.MAC, err)
	}
	return nil
}

// find gives the index of the device.
func find(mac string) (int, error) {
	all, err := net.Interfaces()
	if err != nil {
		return 0, fmt.Errorf("list network devices: %w", err)
	}
	for _, i := range all {
		if i.HardwareAddr.String() == mac {
			return i.Index, nil
		}
	}
	return 0, errdefs.New(errdefs.NotFound, "network device %s: the guest has none; its kernel or initramfs may lack the driver virtio_net", mac)
}

// WriteNameservers writes /etc/resolv.conf below root, unless it says so already. What
// links there lead to is written. The error is of kind UNSUPPORTED when something
// else than a file has its place.
func WriteNameservers(root string, servers []netip.Addr) error {
	var text strings.Builder
	for _, s := range servers {
		fmt.Fprintf(&text, "nameserver %s\n", s)
	}
	path := filepath.Join(root, "etc/resolv.conf")
	if old, err := os.ReadFile(path); err == nil && string(old) == text.String() {
		return nil
	}
	err := os.WriteFile(path, []byte(text.String()), 0o644)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOENT) {
		return errdefs.New(errdefs.Unsupported, "write /etc/resolv.conf: %w; names are not resolved until it can be", err)
	}
	if err != nil {
		return fmt.Errorf("write /etc/resolv.conf: %w", err)
	}
	return nil
}
