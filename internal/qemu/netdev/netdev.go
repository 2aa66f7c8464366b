//go:build linux

// Package netdev makes sure that the network device of a QEMU stands before its
// guest runs. What is connected to it later is not its business.
package netdev

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/qmp"
)

// dialPause is between two looks for a socket that QEMU's thread is making.
const dialPause = 2 * time.Millisecond

// Subscribe collects what Settle waits for; from when QEMU is greeted on.
func Subscribe() *qmp.Subscription {
	return qmp.NewSubscription("NETDEV_STREAM_CONNECTED", "NETDEV_STREAM_DISCONNECTED")
}

// Settle waits until QEMU listens on the device's socket, and knows that nobody is
// connected. It begins to listen in a thread of its own, and takes the link for up
// until that has been told to it: QEMU 7.2 ends by a null pointer at the first
// frame that its guest sends before that, as one may that continues on a busy host.
// A connection that came and went is the proof that it has been told.
func Settle(ctx context.Context, seen *qmp.Subscription, socket string) error {
	if err := connect(ctx, socket); err != nil {
		return fmt.Errorf("connect to network device: %w", err)
	}
	for range 2 { // that it came, and that it went
		if _, err := seen.Next(ctx); err != nil {
			return fmt.Errorf("await network device: %w", err)
		}
	}
	return nil
}

// connect makes a connection and ends it.
func connect(ctx context.Context, socket string) error {
	var d net.Dialer
	for {
		conn, err := d.DialContext(ctx, "unix", socket)
		if err == nil {
			return conn.Close()
		}
		if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
		select {
		case <-time.After(dialPause): // nothing tells when it is there
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
