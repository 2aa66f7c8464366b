package machinetest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"slices"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// keepOne boots a run, lets it write, and keeps it.
func (s *suite) keepOne(w machine.Window) (machine.Run, machine.RunConfig, kept) {
	s.t.Helper()
	cfg := s.Config(s.t)
	r := s.launch(cfg)
	s.must(r.Resume(s.ctx))
	s.awaitWrites(r)
	return r, cfg, s.keep(r, cfg, w)
}

func (s *suite) continueRun() {
	source, cfg, k := s.keepOne(machine.Window{})
	s.wantRunning(source, true)
	next := s.launch(s.next(cfg, k))
	s.wantRunning(next, false)
	s.wantKept(next, k, cfg.MemoryBytes)
	s.must(next.Resume(s.ctx))
	s.wantRunning(next, true)
	s.awaitWrites(next)
	c, err := next.DialLink(s.ctx)
	s.must(err)
	s.must(c.Close())
	s.must(next.Pause(s.ctx))
	s.must(next.SwitchDisk(s.ctx, s.Overlay(s.t)))
	s.must(next.Resume(s.ctx))
	s.awaitWrites(source)
}

func (s *suite) continueAgain() {
	r, cfg, k := s.keepOne(machine.Window{})
	for range 3 {
		s.must(r.Kill(s.ctx))
		cfg = s.next(cfg, k)
		r = s.launch(cfg)
		s.must(r.Resume(s.ctx))
		s.awaitWrites(r)
		k = s.keep(r, cfg, machine.Window{StayPaused: true})
		if pages := s.differing(r, k.incoming.MemoryFile, cfg.MemoryBytes); len(pages) > 0 {
			s.t.Errorf("pages %v of a run that stayed paused are not those that were kept", pages)
		}
	}
	last := s.launch(s.next(cfg, k))
	s.wantKept(last, k, cfg.MemoryBytes)
}

func (s *suite) adoptContinued() {
	_, cfg, k := s.keepOne(machine.Window{})
	cfg = s.next(cfg, k)
	r := s.launch(cfg)
	s.must(r.Close())
	r, err := s.Hypervisor.Adopt(s.ctx, cfg, r.Process())
	s.must(err)
	s.endWithTest(r)
	s.wantRunning(r, false)
	s.wantKept(r, k, cfg.MemoryBytes)
	s.must(r.Resume(s.ctx))
	s.awaitWrites(r)
	s.keep(r, cfg, machine.Window{})
	s.wantRunning(r, true)
}

func (s *suite) twoOfOneMemory() {
	source, cfg, k := s.keepOne(machine.Window{StayPaused: true})
	a, b := s.launch(s.next(cfg, k)), s.launch(s.next(cfg, k))
	before := s.wantKept(b, k, cfg.MemoryBytes)
	sum, err := fileDigest(k.incoming.MemoryFile)
	s.must(err)
	s.must(a.Resume(s.ctx))
	s.awaitWrites(a)
	s.must(a.Pause(s.ctx))
	if pages := s.differing(a, k.incoming.MemoryFile, cfg.MemoryBytes); len(pages) <= len(before) {
		s.t.Errorf("only pages %v differ in a run that wrote to its memory", pages)
	}
	if pages := s.differing(b, k.incoming.MemoryFile, cfg.MemoryBytes); !slices.Equal(pages, before) {
		s.t.Errorf("a run's writes reached its sibling: pages %v differ, before %v", pages, before)
	}
	if pages := s.differing(source, k.incoming.MemoryFile, cfg.MemoryBytes); len(pages) > 0 {
		s.t.Errorf("a run's writes reached its source: pages %v differ", pages)
	}
	if now, err := fileDigest(k.incoming.MemoryFile); err != nil || now != sum {
		s.t.Errorf("a run's writes reached the memory file (%v)", err)
	}
	s.must(b.Resume(s.ctx))
	s.awaitWrites(b)
}

func fileDigest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), err
}

func (s *suite) continueDamaged() {
	_, cfg, k := s.keepOne(machine.Window{})
	path := func(name, content string) string {
		p := s.t.TempDir() + "/" + name
		s.must(os.WriteFile(p, []byte(content), 0o600))
		return p
	}
	whole, err := os.ReadFile(k.incoming.DeviceState)
	s.must(err)
	link := s.t.TempDir() + "/memory"
	s.must(os.Symlink(k.incoming.MemoryFile, link))
	for what, c := range map[string]struct {
		change func(*machine.Incoming)
		kind   errdefs.Kind
	}{
		"no memory file":       {func(i *machine.Incoming) { i.MemoryFile += ".gone" }, errdefs.NotFound},
		"short memory file":    {func(i *machine.Incoming) { i.MemoryFile = path("memory", "short") }, errdefs.Storage},
		"linked memory file":   {func(i *machine.Incoming) { i.MemoryFile = link }, errdefs.Storage},
		"no device state":      {func(i *machine.Incoming) { i.DeviceState += ".gone" }, errdefs.NotFound},
		"junk device state":    {func(i *machine.Incoming) { i.DeviceState = path("devices", "junk that is not a device state") }, errdefs.Storage},
		"empty device state":   {func(i *machine.Incoming) { i.DeviceState = path("devices", "") }, errdefs.Storage},
		"shorter device state": {func(i *machine.Incoming) { i.DeviceState = path("devices", string(whole[:len(whole)/2])) }, errdefs.Storage},
	} {
		next := s.next(cfg, k)
		before := s.left(next)
		c.change(next.Incoming)
		_, err := s.Hypervisor.Launch(s.ctx, next)
		s.wantKind(what, err, c.kind)
		if after := s.left(next); len(after) != len(before) {
			s.t.Errorf("%s: left %v, before %v", what, after, before)
		}
	}
	s.launch(s.next(cfg, k))
}

func (s *suite) continueCancelled() {
	_, cfg, k := s.keepOne(machine.Window{})
	next := s.next(cfg, k)
	before := s.left(next)
	for _, limit := range []time.Duration{0, 5 * time.Millisecond, 40 * time.Millisecond, 80 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(s.ctx, limit)
		r, err := s.Hypervisor.Launch(ctx, next)
		cancel()
		if err == nil { // it was that fast
			s.must(r.Kill(s.ctx))
			s.must(r.Close())
			continue
		}
		s.wantKind("launch, cancelled", err, errdefs.Deadline)
		if after := s.left(next); len(after) != len(before) {
			s.t.Errorf("left %v, before %v", after, before)
		}
	}
	s.launch(next)
}

func (s *suite) platform() {
	cfg := s.Config(s.t)
	p, err := s.Hypervisor.Platform(s.ctx, cfg)
	s.must(err)
	again, err := s.Hypervisor.Platform(s.ctx, s.Config(s.t))
	s.must(err)
	s.must(p.Check(again, "checkpoint k", "holdpoint restore"))
	for what, change := range map[string]func(*machine.RunConfig){
		"memory":         func(c *machine.RunConfig) { c.MemoryBytes *= 2 },
		"number of CPUs": func(c *machine.RunConfig) { c.CPUs++ },
	} {
		other := cfg
		change(&other)
		o, err := s.Hypervisor.Platform(s.ctx, other)
		s.must(err)
		s.wantKind("other "+what, p.Check(o, "checkpoint k", "holdpoint restore"), errdefs.Incompatible)
	}
	if p.Hypervisor == "" || p.MachineType == "" || p.CPU == "" || p.Accelerator != cfg.Accelerator || p.Network != machine.NetworkNone || len(p.Devices) == 0 {
		s.t.Errorf("platform is %+v", p)
	}
}
