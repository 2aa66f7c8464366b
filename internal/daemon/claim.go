//go:build linux

package daemon

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// The deadlines of operations. Each is far beyond what the verb takes on a
// slow host; an operation that runs into it is undone.
const (
	quickDeadline = time.Minute
	bootDeadline  = 5 * time.Minute
	storyDeadline = 15 * time.Minute
	buildDeadline = time.Hour
)

// leaseTime is how long an operation's claims live at the longest.
const leaseTime = 2 * time.Hour

// begin admits an operation and answers with it.
func (d *Daemon) begin(ctx context.Context, requestID, verb string, options proto.Message, timeout time.Duration, body operation.Body) (*connect.Response[holdpointv1.Operation], error) {
	request := operation.Request{ID: requestID, Verb: verb, Options: options, Timeout: timeout}
	op, err := d.engine.Begin(ctx, request, body)
	if errdefs.Is(err, errdefs.NoSpace) && freesSpace(verb) && d.reserve.Release() {
		op, err = d.engine.Begin(ctx, request, body)
	}
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(op), nil
}

// freesSpace reports whether a verb is a way out of a full disk.
func freesSpace(verb string) bool {
	switch verb {
	case "stop", "rm", "checkpoint rm", "image rm":
		return true
	}
	return false
}

// claimMachine resolves a machine and leases it to the operation alone.
func (d *Daemon) claimMachine(ctx context.Context, w *operation.Work, ref string) (catalog.Machine, error) {
	m, err := d.catalog.ResolveMachine(ctx, ref)
	if err != nil {
		return m, err
	}
	w.Machine(m.ID, m.Name)
	claim := catalog.Claim{Kind: catalog.MachineResource, ID: m.ID, Exclusive: true}
	if err := d.catalog.Acquire(ctx, w.ID(), leaseTime, claim); err != nil {
		return m, err
	}
	// It may have changed before the lease.
	if m, err = d.catalog.GetMachine(ctx, m.ID); err != nil {
		return m, err
	}
	return m, d.catalog.UseMachine(ctx, m.ID)
}

// checkBoots refuses, before anything is stopped for it, a disk that could not
// be booted: its image or its layers are damaged. what names whose it is.
func (d *Daemon) checkBoots(ctx context.Context, imageID string, layers []catalog.Layer, what string) error {
	if err := d.keeper.CheckImage(ctx, imageID); err != nil {
		return errdefs.New(errdefs.KindOf(err), "%s: %w", what, err)
	}
	return d.capturer.CheckLayers(layers, what)
}

// machineID is the id of the machine that a request narrows itself to; empty
// when it names none.
func (d *Daemon) machineID(ctx context.Context, ref string) (string, error) {
	if ref == "" {
		return "", nil
	}
	m, err := d.catalog.ResolveMachine(ctx, ref)
	return m.ID, err
}
