package machinetest

import (
	"os"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

func (s *suite) adopt() {
	cfg := s.Config(s.t)
	r := s.launch(cfg)
	s.must(r.Resume(s.ctx))
	for _, running := range []bool{true, false} {
		if !running {
			s.must(r.Pause(s.ctx))
		}
		s.must(r.Close())
		next, err := s.Hypervisor.Adopt(s.ctx, cfg, r.Process())
		s.must(err)
		s.endWithTest(next)
		if next.Process() != r.Process() {
			s.t.Errorf("process is %+v, want %+v", next.Process(), r.Process())
		}
		s.wantRunning(next, running)
		r = next
	}
	top := s.Overlay(s.t)
	s.must(r.SwitchDisk(s.ctx, top))
	s.must(r.Close())
	cfg.Disk = append(append([]machine.Layer(nil), cfg.Disk...), top)
	r, err := s.Hypervisor.Adopt(s.ctx, cfg, r.Process())
	s.must(err)
	s.endWithTest(r)
	s.must(r.SwitchDisk(s.ctx, s.Overlay(s.t)))
	c, err := r.DialLink(s.ctx)
	s.must(err)
	s.must(c.Close())
	s.must(r.Kill(s.ctx))
	s.awaitExit(r, machine.Killed)
}

func (s *suite) adoptedExit() {
	cfg := s.Config(s.t)
	r := s.launch(cfg)
	s.must(r.Close())
	next, err := s.Hypervisor.Adopt(s.ctx, cfg, r.Process())
	s.must(err)
	s.endWithTest(next)
	p, err := os.FindProcess(r.Process().PID)
	s.must(err)
	s.must(p.Kill())
	s.awaitExit(next, machine.Crashed)
	s.afterExit(next)
}

func (s *suite) adoptGone() {
	cfg := s.Config(s.t)
	r := s.launch(cfg)
	p := r.Process()
	self, err := os.FindProcess(p.PID)
	s.must(err)
	defer self.Release() //nolint:errcheck // only a handle
	wrong := p
	wrong.StartTime++
	_, err = s.Hypervisor.Adopt(s.ctx, cfg, wrong)
	s.wantKind("adopt with another start time", err, errdefs.NotFound)
	wrong = p
	wrong.BootID = "00000000-0000-0000-0000-000000000000"
	_, err = s.Hypervisor.Adopt(s.ctx, cfg, wrong)
	s.wantKind("adopt with another boot id", err, errdefs.NotFound)
	s.must(r.Resume(s.ctx)) // nothing happened to it
	s.must(r.Kill(s.ctx))
	_, err = s.Hypervisor.Adopt(s.ctx, cfg, p)
	s.wantKind("adopt after the exit", err, errdefs.NotFound)
}
