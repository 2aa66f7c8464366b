package machinetest

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

func (s *suite) switchDisk() {
	r := s.launch(s.Config(s.t))
	s.must(r.SwitchDisk(s.ctx, s.Overlay(s.t))) // before it ever ran
	s.must(r.Resume(s.ctx))
	next := s.Overlay(s.t)
	s.wantKind("switch while running", r.SwitchDisk(s.ctx, next), errdefs.WrongState)
	s.wantRunning(r, true)
	for range 3 {
		s.must(r.Pause(s.ctx))
		s.must(r.SwitchDisk(s.ctx, next))
		s.wantRunning(r, false)
		s.must(r.Resume(s.ctx))
		s.wantRunning(r, true)
		next = s.Overlay(s.t)
	}
}

func (s *suite) failedSwitch() {
	r := s.launch(s.Config(s.t))
	good := s.Overlay(s.t)
	missing := machine.Layer{ID: good.ID, Path: good.Path + ".missing", Format: good.Format}
	junk := machine.Layer{ID: good.ID, Path: good.Path + ".junk", Format: good.Format}
	s.must(os.WriteFile(junk.Path, []byte(strings.Repeat("junk", 1000)), 0o600))
	for what, l := range map[string]machine.Layer{"missing": missing, "junk": junk} {
		if err := r.SwitchDisk(s.ctx, l); err == nil {
			s.t.Errorf("switch to a %s layer worked", what)
		}
	}
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	s.wantKind("switch, cancelled", r.SwitchDisk(ctx, good), errdefs.Interrupted)
	s.must(r.Resume(s.ctx))
	s.must(r.Pause(s.ctx))
	s.must(r.SwitchDisk(s.ctx, good)) // under the same id
	s.must(r.Resume(s.ctx))
}

// switchAtRest: the run goes on; what atRest says is what the caller hears, and
// switched is what was done.
func (s *suite) switchAtRest() {
	r := s.launch(s.Config(s.t))
	now := func(change func(context.Context) error) error { return change(s.ctx) }
	switchTo := func(what string, top machine.Layer, want bool, atRest machine.AtRest) error {
		s.t.Helper()
		switched, err := r.SwitchAtRest(s.ctx, top, atRest)
		if switched != want || want && err != nil {
			s.t.Errorf("%s: switched is %v, error %v", what, switched, err)
		}
		return err
	}
	_ = switchTo("before it ever ran", s.Overlay(s.t), true, now)
	s.must(r.Resume(s.ctx))
	_ = switchTo("while running", s.Overlay(s.t), true, now)
	s.wantRunning(r, true)

	top := s.Overlay(s.t)
	refused := errdefs.New(errdefs.Conflict, "not now")
	s.wantKind("a guest that does not freeze", switchTo("refused", top, false, func(func(context.Context) error) error { return refused }), errdefs.Conflict)
	if err := switchTo("not called", top, false, func(func(context.Context) error) error { return nil }); err == nil {
		s.t.Error("a switch that was not made worked")
	}
	missing := machine.Layer{ID: "gone", Path: top.Path + ".missing", Format: top.Format}
	err := switchTo("missing", missing, false, func(func(context.Context) error) error {
		s.t.Error("the guest froze for a layer that is missing")
		return nil
	})
	if err == nil {
		s.t.Error("a switch to a missing layer worked")
	}
	switched, err := r.SwitchAtRest(s.ctx, top, func(change func(context.Context) error) error {
		s.must(change(s.ctx))
		return refused
	})
	s.wantKind("a guest that thawed too soon", err, errdefs.Conflict)
	if !switched {
		s.t.Error("the switch was made, and is not told of")
	}
	_ = switchTo("after all that", s.Overlay(s.t), true, now)
	s.wantRunning(r, true)
}

// rawDisk: a raw layer alone is the writable disk, and stays as long as it is.
func (s *suite) rawDisk() {
	const size = 64 << 20
	cfg := s.Config(s.t)
	raw := machine.Layer{ID: "raw", Path: filepath.Join(s.t.TempDir(), "disk.raw"), Format: "raw"}
	s.must(os.WriteFile(raw.Path, nil, 0o600))
	s.must(os.Truncate(raw.Path, size))
	cfg.Disk = []machine.Layer{raw}
	for range 2 {
		r := s.launch(cfg)
		s.must(r.Resume(s.ctx))
		s.must(r.Pause(s.ctx))
		s.must(r.Kill(s.ctx))
		info, err := os.Stat(raw.Path)
		s.must(err)
		if info.Size() != size {
			s.t.Errorf("the disk of %d bytes has %d by now", size, info.Size())
		}
	}
}

func (s *suite) replaceLayers() {
	cfg := s.Config(s.t)
	r := s.launch(cfg)
	s.must(r.Resume(s.ctx))
	chain := slices.Clone(cfg.Disk)
	grow := func() {
		top := s.Overlay(s.t)
		s.must(r.Pause(s.ctx))
		s.must(r.SwitchDisk(s.ctx, top))
		s.must(r.Resume(s.ctx))
		chain = append(chain, top)
	}
	for range 4 {
		grow()
	}
	for _, part := range [][2]int{{2, 3}, {3, 5}, {1, 4}} { // in the middle, up to the top, all
		from, to, merged := part[0], part[1], s.Overlay(s.t)
		s.must(r.ReplaceLayers(s.ctx, chain, from, to, merged))
		s.must(r.ReplaceLayers(s.ctx, chain, from, to, merged)) // changes nothing
		s.wantRunning(r, true)
		chain = slices.Replace(slices.Clone(chain), from, to, merged)
		grow()
	}
	missing := machine.Layer{ID: "gone", Path: chain[1].Path + ".missing", Format: "qcow2"}
	if err := r.ReplaceLayers(s.ctx, chain, 1, 2, missing); err == nil {
		s.t.Error("a layer was replaced by a missing one")
	}
	s.wantKind("replace the image", r.ReplaceLayers(s.ctx, chain, 0, 1, s.Overlay(s.t)), errdefs.Invalid)
	s.wantKind("replace the top", r.ReplaceLayers(s.ctx, chain, 1, len(chain), s.Overlay(s.t)), errdefs.Invalid)
	s.must(r.ReplaceLayers(s.ctx, chain, 1, len(chain)-1, s.Overlay(s.t)))
	grow()
}
