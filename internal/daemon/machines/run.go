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
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
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
	if err != nil {
		return nil, wire.Encode(err)
	}
	return s.Begin(ctx, r.GetRequestId(), "run", r, admission.BootDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		return s.run(ctx, w, r.GetName(), r.GetImage(), spec)
	})
}

func checkSpec(r *holdpointv1.RunMachineRequest) (machine.Spec, error) {
	s := r.GetSpec()
	spec := machine.Spec{
		MemoryBytes: s.GetMemoryBytes(), CPUs: int(s.GetCpus()), DiskBytes: s.GetDiskBytes(),
		OnBoot: s.GetOnBoot(), Tmpfs: s.GetTmpfs(), Network: s.GetNetwork(),
		SuspendAfterMillis: s.GetSuspendAfterMillis(),
	}
	if r.GetName() != "" {
		if err := machine.CheckName("machine", r.GetName()); err != nil {
			return spec, err
		}
	}
	return spec, spec.Complete()
}

func (s *Service) run(ctx context.Context, w *operation.Work, name, imageRef string, spec machine.Spec) (*holdpointv1.OperationResult, error) {
	img, err := s.Catalog.ResolveImage(ctx, imageRef)
	if err != nil {
		return nil, err
	}
	if spec.DiskBytes == 0 {
		spec.DiskBytes = img.DiskBytes
	}
	if spec.DiskBytes < img.DiskBytes {
		return nil, errdefs.New(errdefs.Invalid, "run: a disk of %d MiB is smaller than that of image %s; use --disk-size %dM or more",
			spec.DiskBytes>>20, imageRef, img.DiskBytes>>20)
	}
	magic := make([]byte, 16)
	rand.Read(magic) // never fails: crypto/rand ends the process instead
	m := catalog.Machine{
		ID: durable.NewID(), Name: name, ImageBuildID: img.BuildID, Spec: spec, State: machine.Creating,
		Generation: 1, LinkMagic: hex.EncodeToString(magic), CreatedAt: time.Now(),
	}
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
	if err := s.create(ctx, w, m); err != nil {
		return nil, err
	}
	return s.View.MachineResult(ctx, m.ID)
}

// create records a machine and boots it; on error nothing of it is left.
func (s *Service) create(ctx context.Context, w *operation.Work, m catalog.Machine) error {
	var steps undo.Stack
	defer steps.Run()
	layer, err := s.Capturer.NewLayer(ctx, m.ID, m.Spec.DiskBytes)
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
	note, err := s.Keeper.Boot(ctx, m.ID)
	if err != nil {
		return err
	}
	if note != "" {
		w.Note("%s", note)
	}
	steps.Release()
	return nil
}
