// Package layers changes which layers the disk of a monitor's run is made of:
// it puts a new top on them, or a merged one in the place of several, and keeps
// the record such that booting from it is right at every moment.
package layers

import (
	"cmp"
	"context"
	"log/slog"
	"path/filepath"
	"slices"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// Supervisor is the monitor whose run's disk it is. Its caller has the turn to
// change the run.
type Supervisor interface {
	// Present is what the record says now, with the run's config.
	Present() (machine.Run, machine.RunConfig, monitor.Record)
	// Record makes a change durable, and then visible.
	Record(change func(*monitor.Record)) error
	// Amend makes a change visible, and durable with the next one that is if
	// it cannot be now.
	Amend(change func(*monitor.Record))
}

// Switch makes top the writable top. It records the new chain first: booting
// from it is right whether or not the switch was made. Switching to what is the
// top already changes nothing.
func Switch(ctx context.Context, s Supervisor, run machine.Run, top machine.Layer) error {
	_, cfg, old := s.Present()
	last := old.Disk[len(old.Disk)-1]
	switch {
	case last == top && !old.Switching:
		return nil
	case old.Switching && last != top:
		return errdefs.New(errdefs.OutcomeUnknown, "switch disk of machine %s to layer %s: a switch to layer %s is not completed; repeat that one first", cfg.MachineName, top.ID, last.ID)
	case last != top && slices.ContainsFunc(old.Disk, func(l machine.Layer) bool { return l.ID == top.ID || l.Path == top.Path }):
		return errdefs.New(errdefs.Invalid, "switch disk of machine %s: layer %s is below its top already", cfg.MachineName, top.ID)
	case old.Phase != monitor.UserPaused:
		return errdefs.New(errdefs.WrongState, "switch disk of machine %s: it is %s; pause it first", cfg.MachineName, old.Phase)
	}
	if last != top {
		err := s.Record(func(r *monitor.Record) { r.Disk, r.Switching = append(r.Disk, top), true })
		if err != nil {
			return err
		}
	}
	if err := run.SwitchDisk(ctx, top); err != nil {
		if old.Switching || machine.Ended(run) || ctx.Err() != nil || errdefs.Is(err, errdefs.OutcomeUnknown) {
			return err // unknown: the longer chain stays, which is harmless
		}
		if back := s.Record(func(r *monitor.Record) { r.Disk, r.Switching = old.Disk, false }); back != nil {
			return back
		}
		return err
	}
	return s.Record(func(r *monitor.Record) { r.Switching = false })
}

// SwitchAtRest makes top, which is not part of the disk yet, the writable top of
// a run that goes on, while atRest keeps its guest from writing. It records the new
// chain first, which stays unless it is certain that the switch was not made.
func SwitchAtRest(ctx context.Context, s Supervisor, run machine.Run, top machine.Layer, atRest machine.AtRest) error {
	_, cfg, old := s.Present()
	switch {
	case old.Phase != monitor.Running:
		return errdefs.New(errdefs.WrongState, "switch disk of machine %s: it is %s, and its guest has to freeze its file systems", cfg.MachineName, old.Phase)
	case old.Switching || old.Capture != nil:
		return errdefs.New(errdefs.MachineBusy, "switch disk of machine %s: another switch of it is not completed; try again", cfg.MachineName)
	case slices.ContainsFunc(old.Disk, func(l machine.Layer) bool { return l.ID == top.ID || l.Path == top.Path }):
		return errdefs.New(errdefs.Conflict, "switch disk of machine %s: layer %s belongs to it already: a switch to it was interrupted; take another checkpoint", cfg.MachineName, top.ID)
	}
	if err := s.Record(func(r *monitor.Record) { r.Disk, r.Switching = append(r.Disk, top), true }); err != nil {
		return err
	}
	switched, err := run.SwitchAtRest(ctx, top, atRest)
	maybe := switched || machine.Ended(run) || errdefs.Is(err, errdefs.OutcomeUnknown)
	back := s.Record(func(r *monitor.Record) {
		if r.Switching = false; !maybe {
			r.Disk = old.Disk
		}
	})
	return cmp.Or(err, back)
}

// Settle completes a switch that a predecessor recorded. If it cannot be told,
// the chain stays recorded as it is: the last layer is empty then, and booting
// from it is harmless.
func Settle(ctx context.Context, s Supervisor, run machine.Run, log *slog.Logger) error {
	_, _, rec := s.Present()
	if !rec.Switching {
		return nil
	}
	top := rec.Disk[len(rec.Disk)-1]
	now := func(change func(context.Context) error) error { return change(ctx) }
	if _, err := run.SwitchAtRest(ctx, top, now); err != nil { // the run may be running
		log.Warn("the disk switch that was under way is not completed", "layer", top.ID, "error", err)
		return nil
	}
	return s.Record(func(r *monitor.Record) { r.Switching = false })
}

// Replace puts merged in the place of the layers from the first to the last one
// named, which are next to each other and below the top. It is recorded when it
// is done: until then booting from the old ones is as right. Replacing what has
// been replaced already changes nothing.
func Replace(ctx context.Context, s Supervisor, run machine.Run, firstID, lastID string, merged machine.Layer) error {
	_, cfg, rec := s.Present()
	index := func(id string) int {
		return slices.IndexFunc(rec.Disk, func(l machine.Layer) bool { return l.ID == id })
	}
	from, to := index(firstID), index(lastID)+1
	switch {
	case merged.ID == "" || !filepath.IsAbs(merged.Path):
		return errdefs.New(errdefs.Invalid, "replace layers of machine %s: an id and an absolute path of the merged layer are needed", cfg.MachineName)
	case index(merged.ID) >= 0:
		return nil
	case rec.Switching:
		return errdefs.New(errdefs.OutcomeUnknown, "replace layers of machine %s: a switch of its disk is not completed; repeat that one first", cfg.MachineName)
	case from < 1 || to <= from || to >= len(rec.Disk):
		return errdefs.New(errdefs.Invalid, "replace layers of machine %s: its disk has no layers from %s to %s below its top", cfg.MachineName, firstID, lastID)
	}
	if err := run.ReplaceLayers(ctx, rec.Disk, from, to, merged); err != nil {
		return err
	}
	s.Amend(func(r *monitor.Record) { r.Disk = slices.Replace(slices.Clone(r.Disk), from, to, merged) })
	return nil
}
