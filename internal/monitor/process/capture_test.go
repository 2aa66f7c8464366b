//go:build linux

package process_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/runs"
)

// errEnough ends a watch that has seen what it was for.
var errEnough = errors.New("enough")

const (
	doublePages = 64
	doubleBytes = doublePages * dirty.PageSize
)

// newCaptureBench is a bench whose machine has memory and a disk that can be synced.
func newCaptureBench(t *testing.T) *bench {
	b := newBench(t)
	run := &b.start.Config.Run
	run.MemoryBytes = doubleBytes
	run.Disk[1].Path = filepath.Join(b.dir, "top")
	b.fault("top", "")
	return b
}

// incoming makes the run one that continues from checkpoint k0, whose memory
// has one page.
func (b *bench) incoming() {
	memory := make([]byte, doubleBytes)
	memory[5*dirty.PageSize] = 9
	b.fault("memory-file", string(memory[:6*dirty.PageSize]))
	must(b.t, os.Truncate(filepath.Join(b.dir, "memory-file"), doubleBytes))
	b.start.Config.Run.Incoming = &machine.Incoming{MemoryFile: filepath.Join(b.dir, "memory-file"), DeviceState: "/l/devices", Checkpoint: "k0"}
}

// writes has the guest write to pages.
func (b *bench) writes(content byte, pages ...int) {
	b.t.Helper()
	f, err := os.OpenFile(filepath.Join(b.dir, "guest-memory"), os.O_RDWR|os.O_CREATE, 0o600)
	must(b.t, err)
	must(b.t, f.Truncate(doubleBytes))
	for _, page := range pages {
		_, err = f.WriteAt([]byte{content}, int64(page)*dirty.PageSize)
		must(b.t, err)
	}
	must(b.t, f.Close())
}

// order asks for checkpoint id since parent.
func (b *bench) order(id, parent string) *monitorv1.CaptureRequest {
	dir := filepath.Join(b.dir, "capture-"+id)
	must(b.t, os.MkdirAll(dir, 0o700))
	layer := filepath.Join(b.dir, "layer-"+id)
	must(b.t, os.WriteFile(layer, nil, 0o600))
	return &monitorv1.CaptureRequest{CheckpointId: id, ParentId: parent, LayerId: "l" + id, LayerPath: layer, Dir: dir}
}

// staged gives the pages of a capture, checked to be in its memory file.
func (b *bench) staged(id string) (pages []int) {
	b.t.Helper()
	dir := filepath.Join(b.dir, "capture-"+id)
	data, err := os.ReadFile(filepath.Join(dir, "pages"))
	must(b.t, err)
	var set dirty.Set
	must(b.t, set.UnmarshalBinary(data))
	memory, err := os.ReadFile(filepath.Join(dir, "memory"))
	must(b.t, err)
	var in *machine.Incoming
	if cfg, err := monitor.ReadConfig(b.dir); err == nil {
		in = cfg.Run.Incoming
	}
	want := (&doubleMemory{cfg: machine.RunConfig{Dir: b.dir, MemoryBytes: doubleBytes, Incoming: in}}).content()
	for offset, length := range set.Runs() {
		if !bytes.Equal(memory[offset:offset+length], want[offset:offset+length]) {
			b.t.Errorf("capture %s: memory differs at %#x", id, offset)
		}
		for at := offset; at < offset+length; at += dirty.PageSize {
			pages = append(pages, int(at/dirty.PageSize))
		}
	}
	return pages
}

func (b *bench) wantStaged(id string, want ...int) {
	b.t.Helper()
	if diff := cmp.Diff(want, b.staged(id)); diff != "" {
		b.t.Errorf("pages of %s (-want +got):\n%s", id, diff)
	}
}

// wantClean demands that nothing is left in the staging folder.
func (b *bench) wantClean(id string) {
	b.t.Helper()
	if left, _ := os.ReadDir(filepath.Join(b.dir, "capture-"+id)); len(left) > 0 {
		b.t.Errorf("capture %s left %v", id, left)
	}
}

func (b *bench) record() monitor.Record {
	b.t.Helper()
	rec, err := monitor.ReadRecord(b.dir)
	must(b.t, err)
	return rec
}

func all() (pages []int) {
	for i := range doublePages {
		pages = append(pages, i)
	}
	return pages
}

func TestCapture(t *testing.T) {
	b := newCaptureBench(t)
	c := b.up()
	b.writes(1, 1, 2, 3)
	b.tell("behind")
	b.forgetEvents()
	answer, err := c.Capture(ctx(t), b.order("k1", ""))
	must(t, err)
	b.wantStaged("k1", 1, 2, 3)
	if answer.GetTracking() != "userfaultfd" || answer.GetChangedPages() != 3 || answer.GetPhases().GetRounds() != 1 ||
		!strings.Contains(string(answer.GetPlatform()), `"hypervisor":"double"`) || strings.Join(answer.GetDisk(), ",") != "base,top,lk1" {
		t.Errorf("answer %v", answer)
	}
	if !b.running() {
		t.Error("the guest stands still")
	}
	st, err := c.Status(ctx(t))
	must(t, err)
	if st.GetTracking() != "userfaultfd" || st.GetCpuNano() == 0 || !st.GetLinked() || st.GetWaiting() {
		t.Errorf("status %v", st)
	}

	// Undecided, it is the only one, and the same answer is given again.
	again, err := c.Capture(ctx(t), b.order("k1", ""))
	must(t, err)
	if again.String() != answer.String() {
		t.Errorf("again %v", again)
	}
	if _, err := c.Capture(ctx(t), b.order("k2", "k1")); !errdefs.Is(err, errdefs.MachineBusy) {
		t.Error(err)
	}
	settle(t, c, "unknown", true, true)
	if settled := settle(t, c, "k1", true, false); settled.GetReturned() <= 0 || settled.GetClockTrouble() != "" {
		t.Errorf("settled %v", settled)
	}
	const step = "step clock 300ms\n" // beside the record
	if events := b.read("events.log"); strings.Count(events, step) != 1 {
		t.Error("the clock was not corrected")
	} else {
		b.fault("events.log", strings.ReplaceAll(events, step, ""))
	}
	b.wantEvents(`memory
		arm
		record window base,top,lk1 process=true switching
		window stay=false was=false
		pause
		switch lk1
		resume
		record running base,top,lk1 process=true
		record running base,top,lk1 process=true`)
	if settled := settle(t, c, "k1", true, false); settled.GetReturned() != 0 {
		t.Errorf("settled again %v", settled)
	}

	// Published, the next has what changed since; not published, its pages are
	// in the one after it.
	b.writes(2, 7)
	_, err = c.Capture(ctx(t), b.order("k2", "k1"))
	must(t, err)
	b.wantStaged("k2", 7)
	settle(t, c, "k2", false, false)
	b.writes(2, 8)
	_, err = c.Capture(ctx(t), b.order("k3", "k1"))
	must(t, err)
	b.wantStaged("k3", 7, 8)
	settle(t, c, "k3", true, false)
	if rec := b.record(); rec.Head != "k3" || rec.Capture != nil || chain(rec.Disk) != "base,top,lk1,lk2,lk3" {
		t.Errorf("record %+v", rec)
	}

	// Since one that it does not know, and since none.
	_, err = c.Capture(ctx(t), b.order("k4", "other"))
	must(t, err)
	b.wantStaged("k4", all()...)
	settle(t, c, "k4", true, false)
	_, err = c.Capture(ctx(t), b.order("k5", ""))
	must(t, err)
	b.wantStaged("k5", 1, 2, 3, 7, 8)
	b.killMonitor()
	c = b.ensure()

	// A successor knows the answer, and counts from the run's begin on.
	again, err = c.Capture(ctx(t), b.order("k5", ""))
	must(t, err)
	if again.GetChangedPages() != 5 {
		t.Errorf("again %v", again)
	}
	b.wantStaged("k5", 1, 2, 3, 7, 8)
	settle(t, c, "k5", true, false)
	_, err = c.Capture(ctx(t), b.order("k6", "k5"))
	must(t, err)
	b.wantStaged("k6", 1, 2, 3, 7, 8)
	settle(t, c, "k6", false, false)

	// A reboot begins with a memory that has nothing of the parent's.
	id := b.record().RunID
	b.tell("reset")
	b.awaitRun(c, id)
	_, err = c.Capture(ctx(t), b.order("k7", "k5"))
	must(t, err)
	b.wantStaged("k7", all()...)
	_, err = c.Kill(ctx(t))
	must(t, err)
	settle(t, c, "k7", true, false) // after its end
}

func settle(t *testing.T, c *monitor.Client, id string, published, resume bool) *monitorv1.SettleCaptureResponse {
	t.Helper()
	answer, err := c.SettleCapture(ctx(t), id, published, resume)
	must(t, err)
	return answer
}

// awaitRun waits until another run than id is ready.
func (b *bench) awaitRun(c *monitor.Client, id string) {
	b.t.Helper()
	err := c.Watch(ctx(b.t), func(st *monitorv1.StatusResponse) error {
		if st.GetRunId() != id && st.GetReady() {
			return errEnough
		}
		return nil
	})
	if err != errEnough {
		b.t.Fatal(err)
	}
}

func TestRefusedCaptures(t *testing.T) {
	b := newCaptureBench(t)
	b.fault("memory-fails", "")
	c := b.up()
	if _, err := c.Capture(ctx(t), b.order("k1", "")); !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "ptrace is forbidden") {
		t.Error(err)
	}
	must(t, os.Remove(filepath.Join(b.dir, "memory-fails")))
	b.fault("window-unsupported", "")
	if _, err := c.Capture(ctx(t), b.order("k1", "")); !errdefs.Is(err, errdefs.Unsupported) {
		t.Error(err)
	}
	if rec := b.record(); chain(rec.Disk) != "base,top" || rec.Phase != monitor.Running || rec.Capture != nil {
		t.Errorf("record %+v", rec)
	}
	must(t, os.Remove(filepath.Join(b.dir, "window-unsupported")))
	for _, bad := range []*monitorv1.CaptureRequest{{}, {CheckpointId: "k", LayerId: "l", LayerPath: "rel", Dir: "/d"}} {
		if _, err := c.Capture(ctx(t), bad); !errdefs.Is(err, errdefs.Invalid) {
			t.Error(err)
		}
	}
	req := b.order("k1", "")
	req.LayerId = "top"
	if _, err := c.Capture(ctx(t), req); !errdefs.Is(err, errdefs.Conflict) {
		t.Error(err)
	}
	b.wantClean("k1")
	_, err := c.Capture(ctx(t), b.order("k1", ""))
	must(t, err)
}

func TestFailedCaptures(t *testing.T) {
	b := newCaptureBench(t)
	c := b.up()
	b.writes(1, 4)
	for _, fault := range []string{"scan-fails", "window-fails", "pause-fails", "switch-fails"} {
		id := strings.TrimSuffix(fault, "-fails")
		b.fault(fault, "")
		if _, err := c.Capture(ctx(t), b.order(id, "")); err == nil {
			t.Errorf("%s: no error", fault)
		}
		must(t, os.Remove(filepath.Join(b.dir, fault)))
		b.wantClean(id)
		if rec := b.record(); rec.Phase != monitor.Running || rec.Capture != nil || rec.Switching || !b.running() {
			t.Errorf("%s: record %+v", fault, rec)
		}
	}
	b.fault("clock-fails", "")
	b.tell("behind")
	_, err := c.Capture(ctx(t), b.order("k1", ""))
	must(t, err)
	b.wantStaged("k1", 4)
	if settled := settle(t, c, "k1", true, false); !strings.Contains(settled.GetClockTrouble(), "the clock is broken") || settled.GetReturned() != 0 {
		t.Errorf("settled %v", settled)
	}
}

// TestUnknownWindow: the guest is let go when its hypervisor answers again.
func TestUnknownWindow(t *testing.T) {
	b := newCaptureBench(t)
	c := b.up()
	b.fault("window-unknown", "")
	b.fault("resume-fails", "")
	if _, err := c.Capture(ctx(t), b.order("k1", "")); !errdefs.Is(err, errdefs.OutcomeUnknown) {
		t.Error(err)
	}
	if rec := b.record(); rec.Phase != monitor.Window {
		t.Errorf("record %+v", rec)
	}
	if _, err := c.Capture(ctx(t), b.order("k2", "")); !errdefs.Is(err, errdefs.WrongState) {
		t.Error(err)
	}
	must(t, os.Remove(filepath.Join(b.dir, "window-unknown")))
	must(t, os.Remove(filepath.Join(b.dir, "resume-fails")))
	b.awaitPhase(c, monitorv1.Phase_PHASE_RUNNING)
	if !b.running() {
		t.Error("it is not let go")
	}
	_, err := c.Capture(ctx(t), b.order("k2", ""))
	must(t, err)
}

func (b *bench) awaitPhase(c *monitor.Client, phase monitorv1.Phase) {
	b.t.Helper()
	err := c.Watch(ctx(b.t), func(st *monitorv1.StatusResponse) error {
		if st.GetPhase() == phase {
			return errEnough
		}
		return nil
	})
	if err != errEnough {
		b.t.Fatal(err)
	}
}

// TestMonitorDiesInWindow: the successor lets the guest go and cleans up.
func TestMonitorDiesInWindow(t *testing.T) {
	for _, stay := range []bool{false, true} {
		b := newCaptureBench(t)
		c := b.up()
		b.fault("die-in-window", "")
		req := b.order("k1", "")
		req.StayPaused = stay
		if _, err := c.Capture(ctx(t), req); err == nil {
			t.Error("no error")
		}
		b.awaitDead()
		if b.running() || b.record().Phase != monitor.Window {
			t.Error("it did not die in the window")
		}
		c = b.ensure()
		if !b.running() {
			t.Error("the guest was not let go")
		}
		if rec := b.record(); rec.Phase != monitor.Running || rec.Capture != nil || rec.Switching || chain(rec.Disk) != "base,top,lk1" {
			t.Errorf("record %+v", rec)
		}
		b.wantClean("k1")
		// The layer may be in use, so the same one cannot be asked for again.
		if _, err := c.Capture(ctx(t), req); !errdefs.Is(err, errdefs.Conflict) {
			t.Error(err)
		}
		settle(t, c, "k1", false, true)
		_, err := c.Capture(ctx(t), b.order("k2", ""))
		must(t, err)
	}
}

func TestHeldCapture(t *testing.T) {
	b := newCaptureBench(t)
	c := b.up()
	req := b.order("k1", "")
	req.StayPaused = true
	_, err := c.Capture(ctx(t), req)
	must(t, err)
	if b.running() || b.record().Phase != monitor.Held {
		t.Error("it is not held")
	}
	b.killMonitor()
	c = b.ensure()
	if b.running() || b.record().Phase != monitor.Held {
		t.Error("it is not held by the successor")
	}
	if _, err := c.Agent().Ping(ctx(t), connect.NewRequest(&agentv1.PingRequest{})); err == nil || !strings.Contains(err.Error(), "stands still") {
		t.Error("a held guest answers", err)
	}
	settle(t, c, "k1", true, false)
	if b.running() {
		t.Error("it was let go")
	}
	b.killMonitor()
	c = b.ensure()
	settle(t, c, "k1", true, true)
	if !b.running() || b.record().Phase != monitor.Running {
		t.Error("it was not let go")
	}
	_, err = c.AwaitReady(ctx(t))
	must(t, err)

	// Of one that a user paused, the pause stays.
	must(t, c.Pause(ctx(t)))
	for i, stay := range []bool{false, true} {
		req = b.order([]string{"k2", "k3"}[i], "k1")
		req.StayPaused = stay
		_, err = c.Capture(ctx(t), req)
		must(t, err)
		settle(t, c, req.GetCheckpointId(), false, true)
		if b.running() || b.record().Phase != monitor.UserPaused {
			t.Error("the user's pause was ended")
		}
	}
	b.tell("behind")
	must(t, c.Resume(ctx(t)))
	if !strings.HasSuffix(strings.TrimSpace(b.read("events.log")), "step clock 300ms") {
		t.Error("the clock was not corrected after the pause")
	}
}

func TestContinuedRun(t *testing.T) {
	b := newCaptureBench(t)
	b.incoming()
	c := b.up()
	b.wantEvents(`record booting base,top process=false
		launch base,top from k0
		record booting base,top process=true
		resume
		continue m entropy=64
		step clock 1h0m0s
		record running base,top process=true`)
	st, err := c.Status(ctx(t))
	must(t, err)
	if st.GetClosedSockets() != 3 {
		t.Errorf("status %v", st)
	}
	b.writes(1, 2)
	_, err = c.Capture(ctx(t), b.order("k1", "k0"))
	must(t, err)
	b.wantStaged("k1", 2)
	settle(t, c, "k1", false, false)
	_, err = c.Capture(ctx(t), b.order("k2", "")) // what the memory file has, too
	must(t, err)
	b.wantStaged("k2", 0, 1, 2, 3, 4, 5)
	settle(t, c, "k2", true, false)

	// A successor does not tell it again; a reboot boots.
	b.killMonitor()
	b.forgetEvents()
	c = b.ensure()
	_, err = c.AwaitReady(ctx(t))
	must(t, err)
	b.wantEvents("adopt base,top,lk1,lk2\n\tresume")
	id := b.record().RunID
	b.forgetEvents()
	b.tell("reset")
	b.awaitRun(c, id)
	if events := b.read("events.log"); !strings.Contains(events, "launch base,top,lk1,lk2\n") || !strings.Contains(events, "configure m nginx") {
		t.Errorf("events %s", events)
	}
}

// TestContinuedRunFailsClosed: it is not ready until the guest acknowledged.
func TestContinuedRunFailsClosed(t *testing.T) {
	b := newCaptureBench(t)
	b.incoming()
	b.fault("continue-fails", "")
	c, err := monitor.Start(ctx(t), b.start)
	must(t, err)
	t.Cleanup(c.Close)
	err = c.Watch(ctx(t), func(st *monitorv1.StatusResponse) error {
		if strings.Contains(st.GetRefused(), "no entropy device") && strings.Contains(st.GetRefused(), "--as-is") {
			return errEnough
		}
		return nil
	})
	if st, serr := c.Status(ctx(t)); err != errEnough || serr != nil || st.GetReady() {
		t.Error(err, serr, st)
	}
	b.start.Config = nil
	b.killMonitor()
	must(t, os.Remove(filepath.Join(b.dir, "continue-fails")))
	c = b.ensure()
	_, err = c.AwaitReady(ctx(t))
	must(t, err)

	b = newCaptureBench(t)
	b.incoming()
	b.fault("continue-fails", "")
	b.start.Config.AsIs = true
	c = b.up()
	_, err = c.Capture(ctx(t), b.order("k1", "k0"))
	must(t, err)
	b.killMonitor()
	c = b.ensure()
	_, err = c.AwaitReady(ctx(t))
	must(t, err)
	if offset, _ := clock(t, c); offset > -59*time.Minute {
		t.Errorf("a guest taken as it is was told the time: %s", offset)
	}

	b = newCaptureBench(t)
	b.incoming()
	b.start.Config.Run.Incoming.Unconfigured = true
	b.up()
	if events := b.read("events.log"); !strings.Contains(events, "configure m nginx") || strings.Contains(events, "continue") {
		t.Errorf("events %s", events)
	}
}

func activation() monitor.Activation {
	return monitor.Activation{
		MachineID: "00000000000000cc", MachineName: "child",
		Guest: monitor.Guest{Hostname: "child", OnBoot: "httpd", Tmpfs: []string{"/x"}}, Kernel: "/k", Initramfs: "/i",
	}
}

func TestStandby(t *testing.T) {
	b := newCaptureBench(t)
	b.incoming()
	b.start.Config.Wait = true
	c, err := monitor.Start(ctx(t), b.start)
	must(t, err)
	t.Cleanup(c.Close)
	b.start.Config = nil
	for range 2 {
		st, err := c.Status(ctx(t))
		must(t, err)
		if !st.GetWaiting() || st.GetLinked() || st.GetReady() || b.running() {
			t.Errorf("status %v", st)
		}
		for name, err := range map[string]error{
			"pause": c.Pause(ctx(t)), "resume": c.Resume(ctx(t)),
		} {
			if !errdefs.Is(err, errdefs.WrongState) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if _, err := c.Capture(ctx(t), b.order("k1", "k0")); !errdefs.Is(err, errdefs.WrongState) {
			t.Error(err)
		}
		b.killMonitor()
		c = b.ensure()
	}
	if strings.Contains(b.read("events.log"), "resume") {
		t.Error("it has run")
	}

	// Told while the hypervisor does not obey, a successor completes it.
	b.fault("resume-fails", "")
	if err := c.Activate(ctx(t), activation()); err == nil {
		t.Error("no error")
	}
	must(t, os.Remove(filepath.Join(b.dir, "resume-fails")))
	b.killMonitor()
	c = b.ensure()
	_, err = c.AwaitReady(ctx(t))
	must(t, err)
	must(t, c.Activate(ctx(t), activation()))
	other := activation()
	other.MachineID = "00000000000000dd"
	if err := c.Activate(ctx(t), other); !errdefs.Is(err, errdefs.Conflict) {
		t.Error(err)
	}
	st, err := c.Status(ctx(t))
	must(t, err)
	if st.GetWaiting() || !st.GetLinked() || st.GetMachineId() != "00000000000000cc" || !strings.Contains(b.read("events.log"), "continue child ") {
		t.Errorf("status %v", st)
	}
	if runs, err := runs.Of(filepath.Dir(b.dir), "00000000000000cc"); err != nil || len(runs) != 1 {
		t.Error(runs, err)
	}
	// A reboot boots as the one it was told to be.
	b.tell("reset")
	b.awaitRun(c, st.GetRunId())
	if events := b.read("events.log"); !strings.Contains(events, "configure child httpd") {
		t.Errorf("events %s", events)
	}
}

func TestBootThatWaits(t *testing.T) {
	b := newCaptureBench(t)
	b.start.Config.Wait = true
	c, err := monitor.Start(ctx(t), b.start)
	must(t, err)
	t.Cleanup(c.Close)
	b.start.Config = nil
	b.awaitLinked(c)
	if events := b.read("events.log"); strings.Contains(events, "configure") || !b.running() {
		t.Errorf("events %s", events)
	}
	if _, err := c.Agent().Ping(ctx(t), connect.NewRequest(&agentv1.PingRequest{})); err == nil || !strings.Contains(err.Error(), "waits to be told") {
		t.Error(err)
	}
	b.writes(1, 3)
	_, err = c.Capture(ctx(t), b.order("k1", ""))
	must(t, err)
	settle(t, c, "k1", true, false)
	b.wantStaged("k1", 3)
	b.killMonitor()
	c = b.ensure()
	b.awaitLinked(c)
	must(t, c.Activate(ctx(t), activation()))
	_, err = c.AwaitReady(ctx(t))
	must(t, err)
	if events := b.read("events.log"); !strings.Contains(events, "configure child httpd entropy=64") {
		t.Errorf("events %s", events)
	}
	if err := b.record(); err.Head != "k1" {
		t.Errorf("record %+v", err)
	}

	b = newCaptureBench(t)
	if err := b.up().Activate(ctx(t), activation()); !errdefs.Is(err, errdefs.WrongState) {
		t.Error(err)
	}
}

func (b *bench) awaitLinked(c *monitor.Client) {
	b.t.Helper()
	err := c.Watch(ctx(b.t), func(st *monitorv1.StatusResponse) error {
		if st.GetLinked() {
			return errEnough
		}
		return nil
	})
	st, serr := c.Status(ctx(b.t))
	if err != errEnough || serr != nil || st.GetReady() || !st.GetWaiting() {
		b.t.Fatal(err, serr, st)
	}
}

// TestManyCapturesLeaveTheClockRight although each leaves it 300 ms behind.
func TestManyCapturesLeaveTheClockRight(t *testing.T) {
	b := newCaptureBench(t)
	c := b.up()
	parent, began := "", time.Now()
	const rounds = 50
	for i := range rounds {
		id := "k" + string(rune('A'+i))
		b.tell("behind")
		b.writes(byte(i+1), i%doublePages)
		answer, err := c.Capture(ctx(t), b.order(id, parent))
		must(t, err)
		if answer.GetChangedPages() != 1 {
			t.Fatalf("answer %v", answer)
		}
		if settled := settle(t, c, id, true, false); settled.GetClockTrouble() != "" {
			t.Fatalf("settled %v", settled)
		}
		parent = id
	}
	t.Logf("%s each", (time.Since(began) / rounds).Round(100*time.Microsecond))
	awaitClock(t, c)
}
