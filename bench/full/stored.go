//go:build linux

package full

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/bench/talk"
)

const (
	storedCheckpoints = 50
	storedNew         = 2 << 20
	storedFactor      = 1.3
	storedIdle        = 1 << 20
	speedBytes        = 64 << 20
)

// Stored measures what checkpoints take on the host when there is little new
// in each.
func (b *Bench) Stored(ctx context.Context) (err error) {
	m, load, err := b.machine(ctx, busyName, 0, inUse, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.stage.Remove(ctx, busyName)) }()
	if _, err := b.checkpoint(ctx, busyName); err != nil { // has all that is there already
		return err
	}
	var sum, memory, disk int64
	for range storedCheckpoints {
		if _, err := load.Ask(fmt.Sprintf("fill %d", storedNew)); err != nil {
			return err
		}
		r, err := b.checkpoint(ctx, busyName)
		if err != nil {
			return err
		}
		memory, disk = memory+r.GetMemoryBytes(), disk+r.GetDiskBytes()
	}
	sum = memory + disk
	p, _, err := b.peer(ctx, m, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	if _, _, err := p.SaveVM(ctx, "size"); err != nil {
		return err
	}
	one, err := p.StateBytes(ctx)
	if err != nil {
		return err
	}
	goal := int64(storedCheckpoints * (storedFactor*storedNew + storedIdle))
	b.table.Add(table.Row{
		What: "stored bytes of 50 checkpoints with 2 MiB of new random data each", Measured: fmt.Sprintf("%.0f MiB", mib(sum)),
		Against: fmt.Sprintf("50 × savevm: %.0f MiB", mib(storedCheckpoints*one)), Ratio: float64(sum) / float64(storedCheckpoints*one),
		Target: fmt.Sprintf("≤ 1.3 × the new data + 1 MiB each: %.0f MiB", mib(goal)), Met: sum <= goal,
		Phases: fmt.Sprintf("memory %.2f MiB and disk %.2f MiB each", mib(memory)/storedCheckpoints, mib(disk)/storedCheckpoints),
	})
	return nil
}

// speeds are those of the guest's memory.
type speeds struct{ write, read times }

func (s *speeds) take(l talk.Load) error {
	answer, err := l.Ask(fmt.Sprintf("speed %d", speedBytes))
	if err != nil {
		return err
	}
	words := strings.Fields(answer)
	if len(words) != 2 {
		return fmt.Errorf("speed of the guest's memory: %q", answer)
	}
	for i, to := range []*times{&s.write, &s.read} {
		ns, err := strconv.ParseInt(words[i], 10, 64)
		if err != nil {
			return err
		}
		*to = append(*to, millis(time.Duration(ns)))
	}
	return nil
}

func (s *speeds) String() string {
	const bytesOfReads = speedBytes / 8 // one word of each 64 bytes
	return fmt.Sprintf("write %.0f MB/s, %.1f ns a random read", speedBytes/1e3/s.write.p50(), s.read.p50()*1e6/(bytesOfReads/8))
}

// Speed measures the guest's memory: in a steady state, and at the first write
// after a checkpoint, when each page is written for the first time.
func (b *Bench) Speed(ctx context.Context) (err error) {
	m, load, err := b.machine(ctx, busyName, 0, inUse, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.stage.Remove(ctx, busyName)) }()
	p, bare, err := b.peer(ctx, m, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	var steady, first, theirs speeds
	for i := range b.rounds + warmUp {
		if i == warmUp {
			steady, first, theirs = speeds{}, speeds{}, speeds{}
		}
		if _, err := b.checkpoint(ctx, busyName); err != nil {
			return err
		}
		for _, turn := range []struct {
			to   *speeds
			load talk.Load
		}{{&first, load}, {&steady, load}, {&theirs, bare}} {
			if err := turn.to.take(turn.load); err != nil {
				return err
			}
		}
	}
	b.table.Add(table.Row{
		What: "the guest's memory, steady", Measured: steady.String(), Against: "anonymous memory: " + theirs.String(),
		Ratio: steady.write.p50() / theirs.write.p50(),
	})
	b.table.Add(table.Row{
		What: "the guest's memory, first write after a checkpoint", Measured: first.String(), Against: "anonymous memory: " + theirs.String(),
		Ratio: first.write.p50() / theirs.write.p50(),
	})
	return nil
}
