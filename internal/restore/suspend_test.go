package restore_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/capture/capturetest"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/durable/durabletest"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
)

func (s *scene) resumeRequest() restore.ResumeRequest {
	return restore.ResumeRequest{
		Operation: s.Operation, Machine: s.Now(), Destination: s.destination, Host: s.destination, Enter: s.Enter, Note: s.Note,
	}
}

func TestSuspendAndResume(t *testing.T) {
	s := newFullScene(t)
	memory := s.Source.Memory()
	head := s.suspend(t)
	if diff := cmp.Diff([]string{"capture", "kill"}, s.Source.Done); diff != "" {
		t.Errorf("done to the run (-want +got):\n%s", diff)
	}
	m := s.Now()
	if m.State != machine.Suspended || m.Head != head || m.MemoryHead != head || m.MemoryFile != "" || m.Exit != restore.SuspendedExit {
		t.Errorf("machine %+v", m)
	}
	// News of the run's end that come late change nothing.
	if err := s.Catalog.EndRun(t.Context(), m.ID, m.RunID, machine.Stopped, "killed"); !errdefs.Is(err, errdefs.WrongState) {
		t.Errorf("late news: %v", err)
	}
	s.next(t)
	chain := s.Chain()
	begun, err := s.restorer.Resume(t.Context(), s.resumeRequest())
	if err != nil || begun.ClosedSockets != 3 {
		t.Fatalf("%+v, %v", begun, err)
	}
	if diff := cmp.Diff(memory, s.destination.loaded); diff != "" {
		t.Errorf("memory of the run (-want +got):\n%s", diff)
	}
	if m = s.Now(); m.State != machine.Running || m.MemoryHead != head || m.MemoryFile == "" || m.Generation != 1 || m.RunID != s.destination.launch.RunID {
		t.Errorf("machine %+v", m)
	}
	if !slices.Equal(chain, s.destination.chain) {
		t.Errorf("run on %v, the chain was %v", s.destination.chain, chain)
	}
	if _, err := s.restorer.Resume(t.Context(), s.resumeRequest()); !errdefs.Is(err, errdefs.WrongState) {
		t.Errorf("resume of a running machine: %v", err)
	}
}

// The end of the run may be recorded by who watches it first.
func TestSuspendAfterTheRunsEndWasRecorded(t *testing.T) {
	s := newFullScene(t)
	r := s.suspendRequest()
	r.Run = killer(func(ctx context.Context) error {
		m := s.Now()
		return s.Catalog.EndRun(ctx, m.ID, m.RunID, machine.Stopped, "killed")
	})
	result, err := s.restorer.Suspend(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if m := s.Now(); m.State != machine.Suspended || m.MemoryHead != result.Checkpoint.ID {
		t.Errorf("machine %+v", m)
	}
}

type killer func(ctx context.Context) error

func (k killer) Kill(ctx context.Context) error { return k(ctx) }

func TestSuspendThatFails(t *testing.T) {
	tests := map[string]struct {
		fails     map[string]bool
		kind      errdefs.Kind
		running   bool
		published bool
	}{
		"capture":            {map[string]bool{"capture": true}, errdefs.Internal, true, false},
		"staged torn":        {map[string]bool{"stage": true}, errdefs.Storage, true, false},
		"run does not end":   {map[string]bool{"kill": true}, errdefs.Internal, true, true},
		"nor does it go on":  {map[string]bool{"kill": true, "published, resumed": true}, errdefs.OutcomeUnknown, false, true},
		"disk does not tell": {map[string]bool{"capture": true, "disk": true}, errdefs.Internal, true, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newFullScene(t)
			s.Source.Fails = test.fails
			r := s.suspendRequest()
			_, err := s.restorer.Suspend(t.Context(), r)
			if !errdefs.Is(err, test.kind) {
				t.Errorf("error %v (%s), want %s", err, errdefs.KindOf(err), test.kind)
			}
			if s.Source.Running() != test.running || s.Now().State != machine.Running {
				t.Errorf("runs: %v, state %s", s.Source.Running(), s.Now().State)
			}
			if _, err := s.Catalog.GetCheckpoint(t.Context(), r.Checkpoint.Checkpoint.ID); (err == nil) != test.published {
				t.Errorf("published: %v", err)
			}
		})
	}
}

func TestSuspendCrashAtEveryStep(t *testing.T) {
	for k := 0; ; k++ {
		s := newFullScene(t)
		memory := s.Source.Memory()
		r := s.suspendRequest()
		var detail *capture.FullDetail
		r.Checkpoint.Enter = func(ctx context.Context, phase, text string, d any) error {
			err := s.Enter(ctx, phase, text, d)
			if err == nil && phase != capture.PhaseEncode {
				now := d.(capture.FullDetail)
				detail = &now
			}
			return err
		}
		crashed := durabletest.CrashAfter(s.Files, k)
		_, err := s.restorer.Suspend(t.Context(), r)
		if !crashed() {
			if err != nil || k < 15 {
				t.Fatalf("ended after %d steps: %v", k, err)
			}
			return
		}
		s.Files.Before = nil
		s.Reopen()
		suspended := false
		if detail != nil {
			if suspended, err = newRestorer(s.World).SettleSuspend(t.Context(), s.Now(), *detail, s.Source, s.Source); err != nil {
				t.Fatalf("step %d: %v", k, err)
			}
		}
		m := s.Now()
		if suspended != (m.State == machine.Suspended) || suspended == s.Source.Running() {
			t.Errorf("step %d: suspended %v, source runs: %v, machine %+v", k, suspended, s.Source.Running(), m)
		}
		if !suspended {
			continue
		}
		s.restorer = newRestorer(s.World)
		s.next(t)
		if _, err := s.restorer.Resume(t.Context(), s.resumeRequest()); err != nil {
			t.Fatalf("step %d: %v", k, err)
		}
		if diff := cmp.Diff(memory, s.destination.loaded); diff != "" {
			t.Errorf("step %d: memory of the run (-want +got):\n%s", k, diff)
		}
	}
}

// What a run of a failed resume wrote to its disk is not seen by the next one.
func TestResumeThatFails(t *testing.T) {
	s := newFullScene(t)
	head := s.suspend(t)
	s.next(t)
	old := s.Chain()
	s.destination.fails = true
	if _, err := s.restorer.Resume(t.Context(), s.resumeRequest()); !errors.Is(err, capturetest.ErrSource) {
		t.Fatal(err)
	}
	m := s.Now()
	if m.State != machine.Suspended || m.Head != head || m.MemoryHead != head || m.MemoryFile != "" {
		t.Fatalf("machine %+v", m)
	}
	s.destination.fails = false
	s.next(t)
	if _, err := s.restorer.Resume(t.Context(), s.resumeRequest()); err != nil {
		t.Fatal(err)
	}
	n := len(old) - 1
	if chain := s.Chain(); !slices.Equal(chain[:n], old[:n]) || chain[n] == old[n] || !slices.Equal(chain, s.destination.chain) {
		t.Errorf("chain %v, it was %v, run on %v", chain, old, s.destination.chain)
	}
	s.next(t)
	checkFiles(t, s)
}

func TestResumeCrashAtEveryStep(t *testing.T) {
	for _, again := range []bool{false, true} {
		for k := 0; ; k++ {
			s := newFullScene(t)
			head := s.suspend(t)
			s.next(t)
			if again { // a second attempt makes a new top first
				s.destination.fails = true
				if _, err := s.restorer.Resume(t.Context(), s.resumeRequest()); err == nil {
					t.Fatal("it went on")
				}
				s.destination.fails = false
				s.next(t)
			}
			r := s.resumeRequest()
			var detail *restore.ResumeDetail
			r.Enter = func(ctx context.Context, phase, text string, d any) error {
				err := s.Enter(ctx, phase, text, d)
				if err == nil {
					now := d.(restore.ResumeDetail)
					detail = &now
				}
				return err
			}
			crashed := durabletest.CrashAfter(s.Files, k)
			_, err := s.restorer.Resume(t.Context(), r)
			if !crashed() {
				if err != nil || k < 3 {
					t.Fatalf("ended after %d steps: %v", k, err)
				}
				break
			}
			s.Files.Before = nil
			s.Reopen()
			s.restorer = newRestorer(s.World)
			if detail != nil {
				if running, err := s.restorer.SettleResume(t.Context(), s.Now(), *detail, s.destination); err != nil || running {
					t.Fatalf("step %d: running %v, %v", k, running, err)
				}
			}
			if m := s.Now(); m.State != machine.Suspended || m.Head != head || len(s.destination.alive) != 0 {
				t.Fatalf("step %d: machine %+v, alive %v", k, m, s.destination.alive)
			}
			if err := s.RemoveUnknown(); err != nil {
				t.Fatal(err)
			}
			s.next(t)
			checkFiles(t, s)
			if _, err := s.restorer.Resume(t.Context(), s.resumeRequest()); err != nil {
				t.Fatalf("step %d: %v", k, err)
			}
		}
	}
}

func (s *scene) forkRequest(name string) restore.ForkRequest {
	return restore.ForkRequest{
		Operation: s.Operation, Target: s.target, Destination: s.destination, Host: s.destination, Note: s.Note,
		Machine: catalog.Machine{ID: durable.NewID(), Name: name, Generation: 1, LinkMagic: "f" + s.Machine.LinkMagic[1:], RemoveOnStop: true},
	}
}

func TestFork(t *testing.T) {
	s := newFullScene(t)
	runID, layer := s.standby(t)
	for _, from := range []string{restore.FromStandby, restore.FromMemoryFile, restore.FromDisk} {
		r := s.forkRequest("child-" + from)
		r.Boot = from == restore.FromDisk
		result, err := s.restorer.Fork(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		m := result.Machine
		if result.From != from || m.State != machine.Running || m.Head != s.target.ID || m.ForkedFrom != s.target.ID || !m.RemoveOnStop || m.Spec.MemoryBytes != s.Machine.Spec.MemoryBytes {
			t.Errorf("%s: from %s, machine %+v", from, result.From, m)
		}
		if same := m.LinkMagic == s.target.Full.LinkMagic; same == r.Boot || (m.MemoryFile == "") != r.Boot {
			t.Errorf("%s: machine %+v", from, m)
		}
		if want := targetMemory(); !r.Boot && !cmp.Equal(want, s.destination.loaded) {
			t.Errorf("%s: memory %v", from, s.destination.loaded)
		}
		if from == restore.FromStandby && (m.RunID != runID || s.destination.chain[len(s.destination.chain)-1] != layer) {
			t.Errorf("run %s on %v, the standby was %s on %s", m.RunID, s.destination.chain, runID, layer)
		}
	}
	if s.Source.Done != nil {
		t.Errorf("done to the source: %v", s.Source.Done)
	}
	s.next(t)
	checkFiles(t, s)
}

func TestForkOfADiskCheckpointBoots(t *testing.T) {
	s := newScene(t)
	result, err := s.restorer.Fork(t.Context(), s.forkRequest("child"))
	if err != nil || result.From != restore.FromDisk || s.destination.launch.Incoming != nil {
		t.Fatalf("%+v, %v, %+v", result, err, s.destination.launch)
	}
	if chain, err := s.Catalog.Chain(t.Context(), result.Machine.ID); err != nil || len(chain) != len(s.target.Layers)+1 {
		t.Errorf("chain %v, %v", chain, err)
	}
}

func TestForkThatFailsLeavesNothing(t *testing.T) {
	tests := map[string]struct {
		prepare func(*testing.T, *scene, *restore.ForkRequest)
		kind    errdefs.Kind
	}{
		"no run": {func(_ *testing.T, s *scene, _ *restore.ForkRequest) { s.destination.fails = true }, errdefs.Internal},
		"no run, with a standby": {func(t *testing.T, s *scene, _ *restore.ForkRequest) {
			s.standby(t)
			s.destination.fails = true
		}, errdefs.Internal},
		"name taken": {func(_ *testing.T, s *scene, r *restore.ForkRequest) { r.Machine.Name = s.Machine.Name }, errdefs.AlreadyExists},
		"name taken, with a standby": {func(t *testing.T, s *scene, r *restore.ForkRequest) {
			s.standby(t)
			r.Machine.Name = s.Machine.Name
		}, errdefs.AlreadyExists},
		"another CPU": {func(_ *testing.T, s *scene, _ *restore.ForkRequest) { s.destination.differs = true }, errdefs.Incompatible},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newFullScene(t)
			r := s.forkRequest("child")
			test.prepare(t, s, &r)
			_, err := s.restorer.Fork(t.Context(), r)
			if !errdefs.Is(err, test.kind) {
				t.Errorf("error %v (%s), want %s", err, errdefs.KindOf(err), test.kind)
			}
			if list, err := s.Catalog.ListMachines(t.Context()); err != nil || len(list) != 1 || len(s.destination.alive) != 0 {
				t.Errorf("machines %v, %v; alive %v", list, err, s.destination.alive)
			}
			s.next(t)
			checkFiles(t, s)
		})
	}
}

// A crash before any step leaves no child, one in state creating to remove, or
// one that runs.
func TestForkCrashAtEveryStep(t *testing.T) {
	for k := 0; ; k++ {
		s := newFullScene(t)
		r := s.forkRequest("child")
		crashed := durabletest.CrashAfter(s.Files, k)
		_, err := s.restorer.Fork(t.Context(), r)
		if !crashed() {
			if err != nil || k < 8 {
				t.Fatalf("ended after %d steps: %v", k, err)
			}
			return
		}
		s.Files.Before = nil
		s.Reopen()
		child, err := s.Catalog.GetMachine(t.Context(), r.Machine.ID)
		switch {
		case errdefs.Is(err, errdefs.NotFound):
		case err != nil || child.State != machine.Creating:
			t.Fatalf("step %d: %+v, %v", k, child, err)
		default:
			if err := s.Catalog.RemoveMachine(t.Context(), child.ID, s.Operation); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.RemoveUnknown(); err != nil {
			t.Fatal(err)
		}
		s.next(t)
		checkFiles(t, s)
		entries, err := os.ReadDir(s.Home.MemoryFiles())
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range entries {
			if len(entry.Name()) > 16 {
				t.Errorf("step %d: memory files %v", k, entries)
			}
		}
	}
}
