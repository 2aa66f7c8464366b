//go:build linux

package full

import (
	"context"
	"errors"
	"fmt"
	"time"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/bench/peer"
	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/bench/talk"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// The goals under emulation; those under KVM stand beside as text.
const (
	downtimeP50, downtimeP95 = 10, 20 // ms
	downtimeRatio            = 40
	writingP50               = 25 // ms
	bigRatio                 = 1.5
	manyRatio                = 1.2
	durableP50               = 150 // ms
	diskRate                 = 20  // MiB/s
	many                     = 100
)

// windows are the checkpoints of one row.
type windows struct {
	downtime, stop, devices, change, pages, resume times
	precopy, syncDisk, durable, gaps               times
	prepare, capture, encode, publish              times // what durable consists of
	precopied, inWindow                            times // KiB
}

func (w *windows) add(r *holdpointv1.CheckpointResult, gap time.Duration) {
	const kib = 1 << 10
	for _, v := range []struct {
		to *times
		ms float64
	}{
		{&w.downtime, r.GetDowntimeMs()},
		{&w.stop, r.GetWindowStopMs()},
		{&w.devices, r.GetWindowDevicesMs()},
		{&w.change, r.GetWindowSwitchMs()},
		{&w.pages, r.GetWindowPagesMs()},
		{&w.resume, r.GetWindowResumeMs()},
		{&w.precopy, r.GetPrecopyMs()},
		{&w.syncDisk, r.GetSyncDiskMs()},
		{&w.prepare, r.GetPrepareMs()},
		{&w.capture, r.GetCaptureMs()},
		{&w.encode, r.GetEncodeMs()},
		{&w.publish, r.GetPublishMs()},
		{&w.durable, r.GetDurableMs()},
		{&w.gaps, millis(gap)},
		{&w.precopied, float64(r.GetPrecopiedBytes()) / kib},
		{&w.inWindow, float64(r.GetWindowBytes()) / kib},
	} {
		*v.to = append(*v.to, v.ms)
	}
}

// phases are where the window's time goes.
func (w *windows) phases() string {
	return fmt.Sprintf("stop %.1f, devices %.1f, switch %.1f, pages %.1f (beside), resume %.1f ms; in the window %.0f KiB",
		w.stop.p50(), w.devices.p50(), w.change.p50(), w.pages.p50(), w.resume.p50(), w.inWindow.p50())
}

func p50p95(t times) string { return fmt.Sprintf("p50 %.1f ms, p95 %.1f ms", t.p50(), t.p95()) }

// take takes n checkpoints, and between them does what is given, which may be nil.
func (b *Bench) take(ctx context.Context, name string, n int, s *stream, between func(i int) error) (*windows, error) {
	w := &windows{}
	for i := range n + warmUp {
		if s != nil {
			s.take()
		}
		r, err := b.checkpoint(ctx, name)
		if err != nil {
			return nil, err
		}
		gap := time.Duration(0)
		if s != nil {
			gap = s.take()
		}
		if i >= warmUp {
			w.add(r, gap)
		}
		if between != nil {
			if err := between(i); err != nil {
				return nil, err
			}
		}
	}
	return w, nil
}

// Downtime measures how long the guest stands still, how long a checkpoint
// takes to be durable, and both beside QEMU and libvirt.
func (b *Bench) Downtime(ctx context.Context) error {
	m, load, err := b.machine(ctx, busyName, 0, inUse, dirty)
	if err != nil {
		return err
	}
	usual, err := b.besideSaveVM(ctx, m, load)
	if err != nil {
		return err
	}
	if err := b.durable(ctx, m, usual); err != nil {
		return err
	}
	if err := b.whileWriting(ctx, load); err != nil {
		return err
	}
	if err := b.stage.Remove(ctx, busyName); err != nil {
		return err
	}
	if err := b.big(ctx, usual); err != nil {
		return err
	}
	return b.manyOfOne(ctx)
}

// besideSaveVM takes turns with QEMU's savevm.
func (b *Bench) besideSaveVM(ctx context.Context, m *holdpointv1.Machine, load talk.Load) (w *windows, err error) {
	p, _, err := b.peer(ctx, m, dirty)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	s, err := watch(load)
	if err != nil {
		return nil, err
	}
	defer s.close()
	var stood, quiet times
	w, err = b.take(ctx, busyName, b.rounds, s, func(i int) error {
		begin := time.Now()
		tag := fmt.Sprintf("t%d", i)
		_, still, err := p.SaveVM(ctx, tag)
		if err != nil {
			return err
		}
		if i >= warmUp {
			stood = append(stood, millis(still))
		}
		err = p.DropVM(ctx, tag)
		// The stream was not disturbed meanwhile by us: what it has then is noise.
		if took := time.Since(begin); took > 0 && i >= warmUp {
			quiet = append(quiet, millis(s.take()))
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	ratio := stood.p50() / w.downtime.p50()
	b.table.Add(table.Row{
		What: "downtime of a full checkpoint, QMP stop to cont", Measured: p50p95(w.downtime),
		Against: fmt.Sprintf("QEMU savevm stands still for %.0f ms", stood.p50()), Ratio: 1 / ratio,
		Target: "p50 ≤ 10 ms, p95 ≤ 20 ms, ≥ 40 × shorter (KVM: 10 ms, not measured here)",
		Met:    w.downtime.p50() <= downtimeP50 && w.downtime.p95() <= downtimeP95 && ratio >= downtimeRatio, Phases: w.phases(),
	})
	b.table.Add(table.Row{
		What: "the same by the largest gap in a 1 kHz stream from the guest", Measured: p50p95(w.gaps),
		Against: "without a checkpoint: " + p50p95(quiet), Target: "p50 ≤ 10 ms, p95 ≤ 20 ms",
		Met:    w.gaps.p50() <= downtimeP50 && w.gaps.p95() <= downtimeP95,
		Phases: "from the request to durable: the encoding competes for the same cores",
	})
	return w, nil
}

// durable compares with libvirt, where it is.
func (b *Bench) durable(ctx context.Context, m *holdpointv1.Machine, w *windows) error {
	r := table.Row{
		What: "durable, at ≤ 8 MiB dirty", Measured: p50p95(w.durable), Target: "p50 ≤ 150 ms", Met: w.durable.p50() <= durableP50,
		Phases: fmt.Sprintf("prepare %.1f, capture %.1f (pre-copy %.1f of %.1f MiB, disk sync %.1f, window %.1f), encode %.1f, publish %.1f ms",
			w.prepare.p50(), w.capture.p50(), w.precopy.p50(), w.precopied.p50()/1024, w.syncDisk.p50(), w.downtime.p50(), w.encode.p50(), w.publish.p50()),
	}
	took, err := b.libvirt(ctx, m)
	switch {
	case errors.Is(err, peer.ErrNoLibvirt):
		r.Against = "not measured: " + err.Error()
	case err != nil:
		return err
	default:
		r.Against = fmt.Sprintf("virsh snapshot-create-as --memspec, in all: %.0f ms", took.p50())
		r.Ratio = w.durable.p50() / took.p50()
	}
	b.table.Add(r)
	return nil
}

func (b *Bench) libvirt(ctx context.Context, m *holdpointv1.Machine) (took times, err error) {
	cfg, err := b.peerConfig(ctx, m)
	if err != nil {
		return nil, err
	}
	l, err := peer.StartLibvirt(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	if _, err := talk.StartLoad(l.Guest(ctx), b.load, inUse, dirty); err != nil {
		return nil, err
	}
	for i := range b.rounds + warmUp {
		one, err := l.Snapshot(ctx)
		if err != nil {
			return nil, err
		}
		if i >= warmUp {
			took = append(took, millis(one))
		}
	}
	return took, nil
}

// whileWriting measures with a guest that writes to its disk all the time.
func (b *Bench) whileWriting(ctx context.Context, load talk.Load) error {
	if _, err := load.Ask(fmt.Sprintf("disk %d", diskRate)); err != nil {
		return err
	}
	w, err := b.take(ctx, busyName, b.rounds, nil, nil)
	if err != nil {
		return err
	}
	_, err = load.Ask("disk 0")
	b.table.Add(table.Row{
		What: "downtime with the guest writing 20 MiB/s to its disk", Measured: p50p95(w.downtime), Target: "p50 ≤ 25 ms",
		Met: w.downtime.p50() <= writingP50, Phases: w.phases(),
	})
	return err
}

// big measures a machine of 2 GiB of which half is in use.
func (b *Bench) big(ctx context.Context, usual *windows) error {
	const memory, used = 2 << 30, 1024
	if _, _, err := b.machine(ctx, bigName, memory, used, dirty); err != nil {
		return err
	}
	w, err := b.take(ctx, bigName, b.rounds, nil, nil)
	if err != nil {
		return err
	}
	ratio := w.downtime.p50() / usual.downtime.p50()
	b.table.Add(table.Row{
		What: "downtime at 2 GiB with 1 GiB in use", Measured: p50p95(w.downtime),
		Against: fmt.Sprintf("at %d MiB: %.1f ms", machine.DefaultMemory>>20, usual.downtime.p50()), Ratio: ratio,
		Target: "≤ 1.5 ×", Met: ratio <= bigRatio, Phases: w.phases(),
	})
	return b.stage.Remove(ctx, bigName)
}

// manyOfOne compares a machine's last checkpoints with its first.
func (b *Bench) manyOfOne(ctx context.Context) error {
	if _, _, err := b.machine(ctx, busyName, 0, inUse, dirty); err != nil {
		return err
	}
	w, err := b.take(ctx, busyName, many-warmUp, nil, nil)
	if err != nil {
		return err
	}
	n := min(b.rounds, len(w.downtime)/2)
	first, last := w.downtime[:n], w.downtime[len(w.downtime)-n:]
	ratio := last.p50() / first.p50()
	b.table.Add(table.Row{
		What:     fmt.Sprintf("downtime of the %d checkpoints up to the 100th of one machine", n),
		Measured: p50p95(last), Against: fmt.Sprintf("of the %d after its 2nd: %.1f ms", n, first.p50()), Ratio: ratio,
		Target: "≤ 1.2 ×", Met: ratio <= manyRatio, Phases: w.phases(),
	})
	return b.stage.Remove(ctx, busyName)
}
