//go:build linux

package netlink

import (
	"errors"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAsk(t *testing.T) {
	c, err := Open(unix.NETLINK_ROUTE, Timeout)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	links := 0
	for range 2 {
		body := make([]byte, unix.SizeofIfInfomsg)
		if err := c.Ask(unix.RTM_GETLINK, unix.NLM_F_DUMP, body, func([]byte) { links++ }); err != nil {
			t.Fatal(err)
		}
	}
	if links < 2 || links%2 != 0 {
		t.Errorf("%d links in two lists: the loopback is always there", links)
	}
	// No device has this number.
	body := make([]byte, unix.SizeofIfInfomsg)
	body[4], body[5], body[6] = 0xff, 0xff, 0x7f
	err = c.Ask(unix.RTM_GETLINK, unix.NLM_F_ACK, body, nil)
	if errno, ok := err.(syscall.Errno); !ok || !errors.Is(err, unix.ENODEV) {
		t.Errorf("%v (%d)", err, errno)
	}
}
