//go:build linux

// Package view shows records in the API's terms, together with what runs now.
package view

import (
	"cmp"
	"context"
	"encoding/json"
	"net"
	"sync"

	"google.golang.org/protobuf/types/known/timestamppb"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// Viewer shows records.
type Viewer struct {
	Catalog *catalog.Catalog
	Keeper  *keeper.Keeper
	// Path is where a layer is on the host.
	Path func(catalog.Layer) string
	// Proxy is the address of the proxy now; empty until it listens.
	Proxy func() string
	// Problem is why the host does not listen for a TCP route; nil while it does.
	Problem func(port int) error
	// Trouble says why a stopped machine could not be started by itself; "" for
	// none of that.
	Trouble func(machineID string) string

	looked   sync.Once
	tracking string
}

// expected is how full checkpoints of this host's machines find the changed
// pages, or why there can be none, before a run's first one has told.
func (v *Viewer) expected() string {
	v.looked.Do(func() {
		if err := dirty.CheckPolicy(); err != nil {
			v.tracking = "cannot be taken: " + err.Error()
			return
		}
		v.tracking = string(dirty.Best(dirty.Probe()))
	})
	return v.tracking
}

// Spec is a spec.
func Spec(s machine.Spec) *holdpointv1.Spec {
	spec := &holdpointv1.Spec{
		MemoryBytes: s.MemoryBytes, Cpus: uint32(s.CPUs), DiskBytes: s.DiskBytes, DiskFormat: cmp.Or(s.DiskFormat, machine.QcowDisk),
		OnBoot: s.OnBoot, Init: cmp.Or(s.Init, machine.InitAgent), Tmpfs: s.Tmpfs, Network: s.Network,
		SuspendAfterMillis: s.SuspendAfterMillis, NetworkAllow: s.Allow, Restart: cmp.Or(s.Restart, machine.RestartNo),
		CpuLimitMillis: uint32(s.CPULimitMillis), MemoryLimitBytes: s.MemoryLimitBytes,
	}
	for _, port := range s.AllowHost {
		spec.NetworkAllowHost = append(spec.NetworkAllowHost, uint32(port))
	}
	return spec
}

// Machine is a machine as it is now.
func (v *Viewer) Machine(ctx context.Context, m catalog.Machine) (*holdpointv1.Machine, error) {
	img, err := v.Catalog.GetImage(ctx, m.ImageBuildID)
	if err != nil {
		return nil, err
	}
	routes, err := v.Catalog.ListRoutes(ctx, m.ID)
	if err != nil {
		return nil, err
	}
	run := v.Keeper.Run(m.ID)
	view := &holdpointv1.Machine{
		Id: m.ID, Name: m.Name, State: string(keeper.State(m, run)), Image: img.Name, ImageBuildId: m.ImageBuildID,
		Spec: Spec(m.Spec), Generation: m.Generation, CreatedAt: timestamppb.New(m.CreatedAt),
		Operation: m.HeldBy, Exit: m.Exit, Head: m.Head, ChainLength: uint32(m.ChainLength) + 1,
		Routes: v.Routes(routes), ForkedFrom: m.ForkedFrom, RemoveOnStop: m.RemoveOnStop,
		Trouble: v.Trouble(m.ID),
	}
	if view.Image == "" {
		view.Image = m.ImageBuildID
	}
	if m.Spec.Raw() {
		view.ChainLength-- // it rests on no image
		chain, err := v.Catalog.Chain(ctx, m.ID)
		if err != nil {
			return nil, err
		}
		for _, l := range chain { // there is one when it was made
			view.DiskPath = v.Path(l)
		}
	}
	if run != nil {
		if err := run.Lost(); err != nil {
			view.Exit = "unknown: " + err.Error()
		}
		status := run.Status()
		if exit := status.GetExit(); exit != nil && view.Exit == "" {
			view.Exit = keeper.ExitOf(exit) // its record is on its way
		}
		view.RunId, view.Accelerator, view.QemuVersion = status.GetRunId(), status.GetAccelerator(), status.GetQemuVersion()
		view.Trouble = cmp.Or(status.GetTrouble(), view.Trouble)
		view.IsolatedBy, view.NotIsolated = status.GetIsolatedBy(), status.GetNotIsolated()
		view.QemuPid, view.MonitorPid = status.GetQemuPid(), status.GetMonitorPid()
		if view.FullCheckpoints = status.GetTracking(); view.FullCheckpoints == "" {
			view.FullCheckpoints = v.expected()
		}
	}
	if why := m.Spec.LiveBlocker(); why != "" {
		view.FullCheckpoints = "cannot be taken: " + why
	}
	return view, nil
}

// Image is an image.
func Image(i catalog.Image) *holdpointv1.Image {
	return &holdpointv1.Image{
		Name: i.Name, BuildId: i.BuildID, Architecture: i.Architecture, DiskBytes: i.DiskBytes,
		StoredBytes: i.StoredBytes, CreatedAt: timestamppb.New(i.CreatedAt), KernelVersion: i.KernelVersion,
		Packages: i.Packages, UsedBy: uint32(i.UsedBy), Description: i.Description,
	}
}

// Checkpoint is a checkpoint of machine m.
func (v *Viewer) Checkpoint(ctx context.Context, k checkpoint.Checkpoint, m catalog.Machine) (*holdpointv1.Checkpoint, error) {
	var spec machine.Spec
	if err := json.Unmarshal(k.Spec, &spec); err != nil {
		return nil, errdefs.New(errdefs.Storage, "read spec of checkpoint %s: %w", k.ID, err)
	}
	view := &holdpointv1.Checkpoint{
		Id: k.ID, Name: k.Name, Kind: string(k.Kind), Consistency: string(k.Consistency), Parent: k.Parent,
		MachineId: k.MachineID, Machine: m.Name, Message: k.Message, CreatedAt: timestamppb.New(k.CreatedAt),
		Spec: Spec(spec), ImageBuildId: k.ImageBuildID, DiskBytes: k.DiskBytes, Layers: k.Layers,
		Automatic: k.Automatic, Current: m.Head == k.ID,
	}
	for _, r := range k.Routes {
		view.Routes = append(view.Routes, &holdpointv1.Route{
			Host: r.Host, Url: v.url(r.Host), Machine: m.Name, MachineId: m.ID, Port: uint32(r.Port),
			Protocol: machine.RouteProtocol(r.Host),
		})
	}
	view.Verification, view.Problem, view.HookFailure = string(k.Verification), k.Problem, k.HookFailure
	if k.Full == nil {
		if k.Verification == checkpoint.Unverified {
			view.Verification = "" // nobody is going to try
		}
		return view, nil
	}
	return view, v.full(ctx, k, view)
}

// full adds what only full checkpoints have.
func (v *Viewer) full(ctx context.Context, k checkpoint.Checkpoint, view *holdpointv1.Checkpoint) error {
	view.MemoryBytes, view.MemoryLayers, view.Tracking = k.Full.MemoryBytes, k.Full.Memory, k.Full.Tracking
	view.Platform = string(k.Full.Platform)
	view.Consistency = "" // of memory and disk together there is one kind
	pools, err := v.Catalog.Pools(ctx)
	if err != nil {
		return err
	}
	standbys, err := v.Catalog.Standbys(ctx, k.ID)
	if err != nil {
		return err
	}
	view.Pool, view.Standbys = uint32(pools[k.ID]), uint32(len(standbys))
	return nil
}

// url is how a route is reached on this host.
func (v *Viewer) url(host string) string {
	if machine.ListenPort(host) != 0 {
		return "tcp://" + host
	}
	address := v.Proxy()
	if address == "" {
		return ""
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil || port == "80" {
		return "http://" + host + "/"
	}
	return "http://" + host + ":" + port + "/"
}

// Routes are published routes with their URLs.
func (v *Viewer) Routes(routes []catalog.Route) []*holdpointv1.Route {
	var views []*holdpointv1.Route
	for _, r := range routes {
		route := &holdpointv1.Route{
			Host: r.Host, Url: v.url(r.Host), Machine: r.Machine, MachineId: r.MachineID, Port: uint32(r.Port),
			Protocol: machine.RouteProtocol(r.Host),
		}
		if listen := machine.ListenPort(r.Host); listen != 0 {
			if err := v.Problem(listen); err != nil {
				route.Problem = err.Error()
			}
		}
		views = append(views, route)
	}
	return views
}

// Effects are what happened outside a disk.
func Effects(effects []catalog.Effect) []*holdpointv1.Effect {
	var views []*holdpointv1.Effect
	for _, e := range effects {
		views = append(views, &holdpointv1.Effect{Kind: string(e.Kind), What: e.What, At: timestamppb.New(e.At)})
	}
	return views
}

// Changes are routes, compared for a restore.
func Changes(changes []restore.RouteChange) []*holdpointv1.RouteChange {
	var views []*holdpointv1.RouteChange
	for _, c := range changes {
		views = append(views, &holdpointv1.RouteChange{
			Host: c.Host, Change: c.Change, Then: uint32(c.Then), Now: uint32(c.Now), Listening: c.Listening, Owner: c.Owner,
			Protocol: machine.RouteProtocol(c.Host),
		})
	}
	return views
}

// MachineResult is the outcome of a verb that leaves a machine.
func (v *Viewer) MachineResult(ctx context.Context, id string) (*holdpointv1.OperationResult, error) {
	m, err := v.Catalog.GetMachine(ctx, id)
	if err != nil {
		return nil, err
	}
	shown, err := v.Machine(ctx, m)
	if err != nil {
		return nil, err
	}
	// The operation that this is the outcome of is over for whoever reads it.
	shown.Operation = ""
	return &holdpointv1.OperationResult{Machine: shown}, nil
}

// CheckpointNow is a checkpoint with its machine as it is now.
func (v *Viewer) CheckpointNow(ctx context.Context, k checkpoint.Checkpoint) (*holdpointv1.Checkpoint, error) {
	m, err := v.Catalog.GetMachine(ctx, k.MachineID)
	if err != nil {
		return nil, err
	}
	return v.Checkpoint(ctx, k, m)
}
