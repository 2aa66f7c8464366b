//go:build linux

// Package outlet keeps a machine's network connected to the network device of
// its run, one after the other. Where the machine may connect to is decided in
// package network, and whether its guest may be let out yet by the caller.
package outlet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
	"github.com/holdpoint/holdpoint/internal/network"
	"github.com/holdpoint/holdpoint/internal/network/host"
	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// memory is the process's memory limit with a network, in bytes: connections
// have their buffers in it.
const memory = 256 << 20

// retryFirst and retryMost bound the pause after a failed attempt to connect;
// QEMU may listen a moment later than it answers.
const (
	retryFirst = 20 * time.Millisecond
	retryMost  = 2 * time.Second
)

// Outlet is the outside of one machine. Its life: New; Keep for each run.
type Outlet struct {
	// network is nil for a machine that has none.
	network *network.Network
	log     *slog.Logger
}

// New makes the outlet of a machine; nil is one that leads nowhere. INVALID for
// what is no policy. With one, the process gets a higher memory limit.
func New(p *policy.Policy, log *slog.Logger) (*Outlet, error) {
	o := &Outlet{log: log}
	if p == nil {
		return o, nil
	}
	rules, err := p.Compile()
	if err != nil {
		return nil, err
	}
	debug.SetMemoryLimit(memory)
	o.network = network.New(network.Config{Rules: rules, Host: host.Host{}})
	return o, nil
}

// Keep connects the run's network device, once ready returns without an error,
// and again when the connection ends, until ctx does.
func (o *Outlet) Keep(ctx context.Context, run machine.Run, ready func(context.Context) error) {
	dialer, ok := run.(machine.Networked)
	if o.network == nil || !ok || ready(ctx) != nil {
		return
	}
	for retry := retryFirst; ctx.Err() == nil; retry = min(2*retry, retryMost) {
		conn, err := dialer.DialNetwork(ctx)
		if err == nil {
			retry = retryFirst
			err = o.network.Serve(ctx, conn)
		}
		if err == nil {
			err = errors.New("the other side has closed it")
		}
		if ctx.Err() != nil {
			return
		}
		o.log.Info("no link to the network device", "why", err)
		select {
		case <-time.After(retry): // a pause between attempts that fail at once
		case <-ctx.Done():
		}
	}
}

// inheritPatience is how long the network of an adopted run waits for its guest.
const inheritPatience = 30 * time.Second

// Inherit has the guest give up the connections that ended with another monitor, so
// that they do not hang until it uses them. A guest that cannot be asked in time is let
// out all the same.
func (o *Outlet) Inherit(ctx context.Context, guest func(context.Context) (*relay.Conversation, error)) {
	if o.network == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, inheritPatience)
	defer cancel()
	for {
		conv, err := guest(ctx)
		if err == nil {
			_, err = conv.CloseOutside(ctx)
		}
		if err == nil {
			return
		}
		select {
		case <-time.After(retryMost): // a pause between attempts that fail at once
		case <-ctx.Done():
			o.log.Warn("the guest was not asked to give up its connections to the outside", "error", err)
			return
		}
	}
}

// Refused tells what was refused so far; WRONG_STATE without a network.
func (o *Outlet) Refused() (*monitorv1.NetworkResponse, error) {
	if o.network == nil {
		return nil, errdefs.New(errdefs.WrongState, "the machine has no network")
	}
	report := o.network.Report()
	answer := &monitorv1.NetworkResponse{Total: report.Total}
	for _, r := range report.Destinations {
		answer.Refusals = append(answer.Refusals, &monitorv1.NetworkRefusal{
			Protocol: r.Protocol, To: r.To, Reason: r.Why(), Count: r.Count, LastUnixNano: r.Last.UnixNano(),
		})
	}
	return answer, nil
}

// Told is what a freshly booted guest is told, that of its network device included.
func Told(guest monitor.Guest, nic bool) *agentv1.ConfigureRequest {
	told := guest.Told()
	if !nic {
		return told
	}
	prefix := func(addr string, bits int) string { return fmt.Sprintf("%s/%d", addr, bits) }
	told.Network = &agentv1.NetworkDevice{
		Mac: network.GuestMAC, Mtu: network.MTU,
		Addresses:   []string{prefix(network.Guest4, network.PrefixLen4), prefix(network.Guest6, network.PrefixLen6)},
		Gateways:    []string{network.Gateway4, network.Gateway6},
		Nameservers: []string{network.Gateway4},
	}
	return told
}
