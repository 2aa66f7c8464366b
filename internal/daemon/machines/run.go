//go:build linux

package machines

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
	"github.com/holdpoint/holdpoint/internal/shellwords"
	"github.com/holdpoint/holdpoint/internal/undo"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// The phases of run, in the journal.
const (
	phaseCreate = "create"
	phaseBoot   = "boot"
)

// Run creates a machine and boots it.
func (s *Service) Run(ctx context.Context, req *connect.Request[holdpointv1.RunMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	spec, err := checkSpec(r)
	if err == nil {
		err = s.Keeper.CheckLimits(spec)
	}
	if err != nil {
		return nil, wire.Encode(err)
	}
	return s.Begin(ctx, r.GetRequestId(), "run", r, admission.BootDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		return s.run(ctx, w, r, spec)
	})
}

func checkSpec(r *holdpointv1.RunMachineRequest) (machine.Spec, error) {
	s := r.GetSpec()
	spec := machine.Spec{
		MemoryBytes: s.GetMemoryBytes(), CPUs: int(s.GetCpus()), DiskBytes: s.GetDiskBytes(),
		DiskFormat: s.GetDiskFormat(), OnBoot: s.GetOnBoot(), Init: s.GetInit(), Tmpfs: s.GetTmpfs(), Network: s.GetNetwork(), Allow: s.GetNetworkAllow(),
		SuspendAfterMillis: s.GetSuspendAfterMillis(), Restart: s.GetRestart(),
		CPULimitMillis: int(s.GetCpuLimitMillis()), MemoryLimitBytes: s.GetMemoryLimitBytes(),
	}
	for _, port := range s.GetNetworkAllowHost() {
		spec.AllowHost = append(spec.AllowHost, int(port))
	}
	if r.GetName() != "" {
		if err := machine.CheckName("machine", r.GetName()); err != nil {
			return spec, err
		}
	}
	if err := spec.Complete(); err != nil {
		return spec, err
	}
	if r.GetRemoveOnStop() && spec.Restart != "" {
		return spec, errdefs.New(errdefs.Invalid, "run: a machine that is removed when it stops is not restarted; leave out one of --rm and --restart")
	}
	return spec, nil
}

func (s *Service) run(ctx context.Context, w *operation.Work, r *holdpointv1.RunMachineRequest, spec machine.Spec) (*holdpointv1.OperationResult, error) {
	img, err := s.Catalog.ResolveImage(ctx, r.GetImage())
	if err != nil {
		return nil, err
	}
	if spec.DiskBytes == 0 {
		spec.DiskBytes = img.DiskBytes
	}
	if spec.DiskBytes < img.DiskBytes {
		return nil, errdefs.New(errdefs.Invalid, "run: a disk of %d MiB is smaller than that of image %s; use --disk-size %dM or more",
			spec.DiskBytes>>20, r.GetImage(), img.DiskBytes>>20)
	}
	if err := s.byImage(&spec, img.BuildID, r.GetNoOnBoot()); err != nil {
		return nil, err
	}
	m := newMachine(r.GetName())
	m.ImageBuildID, m.Spec, m.RemoveOnStop = img.BuildID, spec, r.GetRemoveOnStop()
	if m.Name == "" {
		m.Name = "m-" + m.ID[:6]
	}
	w.Machine(m.ID, m.Name)
	if err := w.Enter(ctx, phaseCreate, "creating the machine", Detail{MachineID: m.ID}); err != nil {
		return nil, err
	}
	claims := []catalog.Claim{
		{Kind: catalog.MachineResource, ID: m.ID, Exclusive: true}, {Kind: catalog.ImageResource, ID: img.BuildID},
	}
	if err := s.Catalog.Acquire(ctx, w.ID(), admission.LeaseTime, claims...); err != nil {
		return nil, err
	}
	if err := s.begin(ctx, w, m, r.GetBoot()); err != nil {
		return nil, err
	}
	return s.View.MachineResult(ctx, m.ID)
}

// byImage gives the spec what its image says of programs and, unless the user did,
// of process 1. A command for boots counts unless the user gave one, or wants none.
func (s *Service) byImage(spec *machine.Spec, buildID string, none bool) (err error) {
	if spec.Defaults, err = s.Keeper.Defaults(buildID); err != nil {
		return err
	}
	if spec.Init == "" {
		if spec.Init, err = s.Keeper.ImageInit(buildID); err != nil {
			return err
		}
	}
	if none || spec.OnBoot != "" {
		spec.Defaults.Command = nil
	}
	if len(spec.Defaults.Command) > 0 {
		spec.OnBoot = shellwords.Quote(spec.Defaults.Command...)
	}
	return nil
}

// newMachine is a machine with an identity of its own.
func newMachine(name string) catalog.Machine {
	magic := make([]byte, 16)
	rand.Read(magic) // never fails: crypto/rand ends the process instead
	return catalog.Machine{
		ID: durable.NewID(), Name: name, State: machine.Creating, Generation: 1,
		LinkMagic: hex.EncodeToString(magic), CreatedAt: time.Now(),
	}
}

// begin makes the machine run, from the image's kept boot where there is one.
func (s *Service) begin(ctx context.Context, w *operation.Work, m catalog.Machine, boot bool) error {
	if boot || m.Spec.Raw() { // a kept boot has an overlay over the image's disk
		return s.create(ctx, w, m, "")
	}
	shape, err := s.Boots.Shape(ctx, m)
	if err != nil {
		return err
	}
	k, found, err := s.Boots.Find(ctx, m.ImageBuildID, shape)
	if err != nil {
		return err
	}
	if !found {
		return s.create(ctx, w, m, shape)
	}
	again, err := s.continueBoot(ctx, w, m, k)
	if !again {
		return err
	}
	return s.create(ctx, w, m, shape)
}

// continueTimeout is how long a guest may take to go on from a kept boot before
// it boots instead: under TCG on a busy host it takes 1 to 5 s.
const continueTimeout = 45 * time.Second

// continueBoot makes the machine go on from a kept boot; again is whether it
// has to boot instead, because that cannot be continued.
func (s *Service) continueBoot(ctx context.Context, w *operation.Work, m catalog.Machine, k checkpoint.Checkpoint) (again bool, err error) {
	claim := catalog.Claim{Kind: catalog.CheckpointResource, ID: k.ID}
	if err := s.Catalog.Acquire(ctx, w.ID(), admission.LeaseTime, claim); err != nil {
		return false, err
	}
	if err := w.Enter(ctx, phaseBoot, "continuing from the image's first boot", Detail{MachineID: m.ID}); err != nil {
		return false, err
	}
	going, cancel := context.WithTimeout(ctx, continueTimeout)
	defer cancel()
	_, err = s.Restorer.Fork(going, restore.ForkRequest{
		Operation: w.ID(), Target: k, Machine: m, Destination: s.Keeper, Host: s.Keeper, Note: w.Note,
	})
	if err == nil || ctx.Err() != nil || errdefs.Is(err, errdefs.AlreadyExists) || errdefs.Is(err, errdefs.NoSpace) {
		return false, err
	}
	w.Note("the image's kept boot could not be continued (%v); it is dropped, and the machine boots", err)
	s.Log.Warn("continue from the boot of an image", "image", k.ImageBuildID, "checkpoint", k.ID, "error", err)
	err = s.Catalog.Release(ctx, w.ID(), claim)
	if err == nil {
		err = s.Boots.Drop(ctx, k)
	}
	if err != nil && !errdefs.Is(err, errdefs.Referenced) {
		return false, err
	}
	return true, nil
}

// create records a machine and boots it; on error nothing of it is left. The
// boot is kept for machines of the same shape, unless that is empty.
func (s *Service) create(ctx context.Context, w *operation.Work, m catalog.Machine, shape string) error {
	var steps undo.Stack
	defer steps.Run()
	layer, err := s.newDisk(ctx, w, m)
	if err != nil {
		return err
	}
	steps.Add(func() { s.Capturer.RemoveFile(s.Capturer.Path(layer)) })
	if err := s.Catalog.CreateMachine(ctx, m, layer); err != nil {
		return err
	}
	steps.Release()
	steps.Add(func() {
		undoing, cancel := context.WithTimeout(context.WithoutCancel(ctx), admission.UndoTimeout)
		defer cancel()
		if err := s.Keeper.Drop(undoing, w.ID(), m); err != nil {
			s.Log.Error("undo the creation of a machine", "machine", m.Name, "error", err)
		}
	})
	s.Gates.SetGeneration(m.ID, m.Generation)
	if err := w.Enter(ctx, phaseBoot, "booting the guest", Detail{MachineID: m.ID}); err != nil {
		return err
	}
	if err := s.Boots.Boot(ctx, w, m.ID, shape); err != nil {
		return err
	}
	steps.Release()
	return nil
}

// newDisk is what a new machine writes to: an empty overlay over the image's root
// disk, or a copy of that.
func (s *Service) newDisk(ctx context.Context, w *operation.Work, m catalog.Machine) (catalog.Layer, error) {
	if !m.Spec.Raw() {
		return s.Capturer.NewLayer(ctx, m.ID, m.Spec.DiskBytes)
	}
	root, err := s.Keeper.RootDisk(m.ImageBuildID)
	if err != nil {
		return catalog.Layer{}, err
	}
	return s.Capturer.CopyDisk(ctx, m.ID, root, m.Spec.DiskBytes, w.Copying)
}
