//go:build linux

package daemon

import (
	"context"
	"encoding/json"
	"net"

	"google.golang.org/protobuf/types/known/timestamppb"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
)

func specView(s machine.Spec) *holdpointv1.Spec {
	return &holdpointv1.Spec{
		MemoryBytes: s.MemoryBytes, Cpus: uint32(s.CPUs), DiskBytes: s.DiskBytes,
		OnBoot: s.OnBoot, Tmpfs: s.Tmpfs, Network: s.Network,
	}
}

// machineView is a machine as it is now.
func (d *Daemon) machineView(ctx context.Context, m catalog.Machine) (*holdpointv1.Machine, error) {
	img, err := d.catalog.GetImage(ctx, m.ImageBuildID)
	if err != nil {
		return nil, err
	}
	routes, err := d.catalog.ListRoutes(ctx, m.ID)
	if err != nil {
		return nil, err
	}
	run := d.keeper.Run(m.ID)
	view := &holdpointv1.Machine{
		Id: m.ID, Name: m.Name, State: string(keeper.State(m, run)), Image: img.Name, ImageBuildId: m.ImageBuildID,
		Spec: specView(m.Spec), Generation: m.Generation, CreatedAt: timestamppb.New(m.CreatedAt),
		Operation: m.HeldBy, Exit: m.Exit, Head: m.Head, ChainLength: uint32(m.ChainLength) + 1,
		Routes: d.routeViews(routes),
	}
	if view.Image == "" {
		view.Image = m.ImageBuildID
	}
	if run != nil {
		status := run.Status()
		view.RunId, view.Accelerator, view.QemuVersion = status.GetRunId(), status.GetAccelerator(), status.GetQemuVersion()
		view.QemuPid, view.MonitorPid = status.GetQemuPid(), status.GetMonitorPid()
	}
	return view, nil
}

func imageView(i catalog.Image) *holdpointv1.Image {
	return &holdpointv1.Image{
		Name: i.Name, BuildId: i.BuildID, Architecture: i.Architecture, DiskBytes: i.DiskBytes,
		StoredBytes: i.StoredBytes, CreatedAt: timestamppb.New(i.CreatedAt), KernelVersion: i.KernelVersion,
		Packages: i.Packages, UsedBy: uint32(i.UsedBy), Description: i.Description,
	}
}

// checkpointView is a checkpoint of machine m.
func (d *Daemon) checkpointView(k checkpoint.Checkpoint, m catalog.Machine) (*holdpointv1.Checkpoint, error) {
	var spec machine.Spec
	if err := json.Unmarshal(k.Spec, &spec); err != nil {
		return nil, errdefs.New(errdefs.Storage, "read spec of checkpoint %s: %w", k.ID, err)
	}
	view := &holdpointv1.Checkpoint{
		Id: k.ID, Name: k.Name, Kind: string(k.Kind), Consistency: string(k.Consistency), Parent: k.Parent,
		MachineId: k.MachineID, Machine: m.Name, Message: k.Message, CreatedAt: timestamppb.New(k.CreatedAt),
		Spec: specView(spec), ImageBuildId: k.ImageBuildID, DiskBytes: k.DiskBytes, Layers: k.Layers,
		Automatic: k.Automatic, Current: m.Head == k.ID,
	}
	for _, r := range k.Routes {
		view.Routes = append(view.Routes, &holdpointv1.Route{
			Host: r.Host, Url: d.url(r.Host), Machine: m.Name, MachineId: m.ID, Port: uint32(r.Port),
		})
	}
	return view, nil
}

// url is how a published host is reached on this host.
func (d *Daemon) url(host string) string {
	address := d.proxyAddress()
	if address == "" {
		return ""
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil || port == "80" {
		return "http://" + host + "/"
	}
	return "http://" + host + ":" + port + "/"
}

func (d *Daemon) routeViews(routes []catalog.Route) []*holdpointv1.Route {
	var views []*holdpointv1.Route
	for _, r := range routes {
		views = append(views, &holdpointv1.Route{
			Host: r.Host, Url: d.url(r.Host), Machine: r.Machine, MachineId: r.MachineID, Port: uint32(r.Port),
		})
	}
	return views
}

func changeViews(changes []restore.RouteChange) []*holdpointv1.RouteChange {
	var views []*holdpointv1.RouteChange
	for _, c := range changes {
		views = append(views, &holdpointv1.RouteChange{
			Host: c.Host, Change: c.Change, Then: uint32(c.Then), Now: uint32(c.Now), Listening: c.Listening, Owner: c.Owner,
		})
	}
	return views
}
