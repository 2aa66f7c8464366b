//go:build linux

package process_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/wire"
)

const stallLine = "machine m stands still because the host could not write its disk (free space in "

// awaitTrouble waits until the status says what stalls a run, or nothing.
func (b *bench) awaitTrouble(c *monitor.Client, stalled bool) {
	b.t.Helper()
	for range 2000 {
		st, err := c.Status(ctx(b.t))
		must(b.t, err)
		if stalled && strings.Contains(st.GetTrouble(), stallLine) || !stalled && st.GetTrouble() == "" {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	b.t.Fatalf("stalled is not %t", stalled)
}

// wantStalled checks that err is what a stalled machine's requests get.
func wantStalled(t *testing.T, what string, err error) {
	t.Helper()
	if !errdefs.Is(err, errdefs.WrongState) || !strings.Contains(err.Error(), stallLine) {
		t.Errorf("%s: %v", what, err)
	}
}

func (b *bench) stall(c *monitor.Client) {
	b.t.Helper()
	b.fault("disk-full", "")
	b.tell("behind")
	b.tell("stall")
	b.awaitTrouble(c, true)
}

func (b *bench) wantRefused(c *monitor.Client) {
	b.t.Helper()
	began := time.Now()
	s := c.Agent().Exec(ctx(b.t))
	_ = s.Send(&agentv1.ExecRequest{}) // refused, at the latest by the answer
	_, err := s.Receive()
	wantStalled(b.t, "exec", wire.Decode(err))
	_, err = c.Shutdown(ctx(b.t), time.Minute)
	wantStalled(b.t, "stop", err)
	_, err = c.Capture(ctx(b.t), b.order("k1", ""))
	wantStalled(b.t, "capture", err)
	if took := time.Since(began); took > time.Second {
		b.t.Errorf("refusals took %s", took)
	}
}

func TestStalledMachineGoesOnByItself(t *testing.T) {
	b := newCaptureBench(t)
	c := b.up()
	s, _ := command(t, c)
	b.stall(c)
	b.wantRefused(c)
	time.Sleep(2500 * time.Millisecond) // it was tried once
	b.wantRefused(c)
	must(t, os.Remove(filepath.Join(b.dir, "disk-full")))
	b.awaitTrouble(c, false)
	must(t, echo(s, "still the same command"))
	finish(t, s)
	b.awaitEvent("step clock 300ms")
	if rec := b.record(); rec.Phase != monitor.Running {
		t.Errorf("record %+v", rec)
	}
	_, err := c.Capture(ctx(t), b.order("k1", ""))
	must(t, err)
}

func (b *bench) awaitEvent(line string) {
	b.t.Helper()
	for range 1000 {
		if strings.Contains(b.read("events.log"), line+"\n") {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	b.t.Errorf("no event %q", line)
}

func TestUsersPauseOfAStalledMachineWins(t *testing.T) {
	b := newCaptureBench(t)
	c := b.up()
	b.stall(c)
	must(t, c.Pause(ctx(t)))
	must(t, os.Remove(filepath.Join(b.dir, "disk-full")))
	b.forgetEvents()
	time.Sleep(2500 * time.Millisecond)
	if b.running() || strings.Contains(b.read("events.log"), "resume") {
		t.Error("a machine goes on that a user has paused")
	}
	if st, err := c.Status(ctx(t)); err != nil || st.GetPhase() != monitorv1.Phase_PHASE_USER_PAUSED {
		t.Error(st, err)
	}
	b.fault("disk-full", "")
	must(t, c.Resume(ctx(t)))
	b.wantRefused(c)
	must(t, c.Pause(ctx(t)))
	must(t, os.Remove(filepath.Join(b.dir, "disk-full")))
	must(t, c.Resume(ctx(t)))
	s, _ := command(t, c) // at once
	finish(t, s)
	b.awaitEvent("step clock 300ms")
}

func TestSuccessorOfAStalledMachine(t *testing.T) {
	b := newCaptureBench(t)
	c := b.up()
	b.stall(c)
	b.killMonitor()
	c = b.ensure()
	b.awaitTrouble(c, true)
	b.wantRefused(c)
	exit, err := c.Kill(ctx(t))
	must(t, err)
	if exit.GetReason() != "killed" {
		t.Error(exit)
	}
}
