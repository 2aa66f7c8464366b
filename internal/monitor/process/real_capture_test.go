//go:build linux

package process_test

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// realCaptures takes captures of a real guest and keeps the memory of the last.
type realCaptures struct {
	*bench
	c      *monitor.Client
	memory *os.File
	disk   []machine.Layer
	size   int64
	parent string
	count  int
	times  map[string][]time.Duration
}

func newRealCaptures(b *bench, c *monitor.Client) *realCaptures {
	b.t.Helper()
	cfg, err := monitor.ReadConfig(b.dir)
	must(b.t, err)
	r := &realCaptures{bench: b, c: c, disk: cfg.Run.Disk, times: map[string][]time.Duration{}}
	r.size, err = disk.VirtualSize(disk.Layer(r.disk[len(r.disk)-1]))
	must(b.t, err)
	r.memory, err = os.Create(filepath.Join(b.dir, "kept-memory"))
	must(b.t, err)
	b.t.Cleanup(func() { r.memory.Close() })
	must(b.t, r.memory.Truncate(cfg.Run.MemoryBytes))
	return r
}

// request prepares the next capture.
func (r *realCaptures) request() *monitorv1.CaptureRequest {
	r.t.Helper()
	r.count++
	id := fmt.Sprintf("k%d", r.count)
	layer := filepath.Join(r.dir, id+".qcow2")
	must(r.t, disk.New(disk.Config{}).Create(ctx(r.t), layer, r.size))
	dir := filepath.Join(r.dir, "capture-"+id)
	must(r.t, os.Mkdir(dir, 0o700))
	return &monitorv1.CaptureRequest{CheckpointId: id, ParentId: r.parent, LayerId: id, LayerPath: layer, Dir: dir}
}

// take takes one that is published, and lays its pages over the memory kept.
func (r *realCaptures) take(req *monitorv1.CaptureRequest) *monitorv1.CaptureResponse {
	r.t.Helper()
	began := time.Now()
	answer, err := r.c.Capture(ctx(r.t), req)
	must(r.t, err)
	r.note("capture", time.Since(began))
	r.keep(req)
	settled := time.Now()
	trouble := settle(r.t, r.c, req.GetCheckpointId(), true, false).GetClockTrouble()
	r.note("settle", time.Since(settled))
	if trouble != "" {
		r.t.Logf("clock: %s", trouble)
	}
	p := answer.GetPhases()
	for name, ns := range map[string]int64{
		"precopy": p.GetPrecopy(), "sync": p.GetSyncDisk(), "stop": p.GetStop(), "devices": p.GetDevices(),
		"switch": p.GetSwitch(), "pages": p.GetPages(), "resume": p.GetResume(), "downtime": p.GetDowntime(),
	} {
		r.note(name, time.Duration(ns))
	}
	return answer
}

func (r *realCaptures) keep(req *monitorv1.CaptureRequest) {
	r.t.Helper()
	data, err := os.ReadFile(filepath.Join(req.GetDir(), "pages"))
	must(r.t, err)
	var set dirty.Set
	must(r.t, set.UnmarshalBinary(data))
	staged, err := os.Open(filepath.Join(req.GetDir(), "memory"))
	must(r.t, err)
	defer staged.Close()
	for offset, length := range set.Runs() {
		_, err := io.Copy(io.NewOffsetWriter(r.memory, offset), io.NewSectionReader(staged, offset, length))
		must(r.t, err)
	}
	must(r.t, os.Remove(staged.Name()))
	r.disk = append(r.disk, machine.Layer{ID: req.GetLayerId(), Path: req.GetLayerPath(), Format: "qcow2"})
	r.parent = req.GetCheckpointId()
}

func (r *realCaptures) note(what string, d time.Duration) { r.times[what] = append(r.times[what], d) }

func (r *realCaptures) report() {
	for _, what := range []string{"capture", "precopy", "sync", "stop", "devices", "switch", "pages", "resume", "downtime", "settle"} {
		all := slices.Sorted(slices.Values(r.times[what]))
		if len(all) > 0 {
			r.t.Logf("%-9s p50 %8s p95 %8s of %d", what, all[len(all)/2].Round(10*time.Microsecond), all[len(all)*95/100].Round(10*time.Microsecond), len(all))
		}
	}
}

// clock is how far the guest's clock is off, and how well that is known.
func clock(t *testing.T, c *monitor.Client) (offset, doubt time.Duration) {
	t.Helper()
	for range 10 {
		began := time.Now()
		pong, err := c.Agent().Ping(ctx(t), connect.NewRequest(&agentv1.PingRequest{}))
		must(t, err)
		doubt = time.Since(began) / 2
		offset = time.Unix(0, pong.Msg.GetUnixNano()).Sub(began.Add(doubt))
		if doubt < 20*time.Millisecond {
			break
		}
	}
	return offset, doubt
}

// awaitClock waits until the guest's clock is right within 100 ms, as far as
// that can be told here: a busy host answers pings in a second.
func awaitClock(t *testing.T, c *monitor.Client) {
	t.Helper()
	for try := range 20 {
		offset, doubt := clock(t, c)
		if offset.Abs() <= 100*time.Millisecond+doubt {
			t.Logf("the guest's clock is %s off, give or take %s, at try %d", offset.Round(100*time.Microsecond), doubt.Round(100*time.Microsecond), try)
			return
		}
		time.Sleep(100 * time.Millisecond) // it is corrected beside the captures
	}
	t.Error("the guest's clock stays wrong")
}

const ticker = `(i=0; while :; do i=$((i+1)); echo $i >/run/tick.new; mv /run/tick.new /run/tick; sleep 0.05; done) >/dev/null 2>&1 </dev/null & echo $!`

func TestRealCaptures(t *testing.T) {
	b := newRealBench(t)
	c := b.upReal()
	pid := shell(t, c, ticker)
	r := newRealCaptures(b, c)
	first := r.take(r.request())
	t.Logf("first: %d MiB, %v", first.GetChangedPages()/256, first.GetPhases())
	clear(r.times)
	rounds := 20
	if testing.Short() {
		rounds = 3
	}
	for range rounds {
		r.take(r.request())
	}
	r.report()
	awaitClock(t, c)
	r.wantSmall(c)

	// One that keeps it paused is kept so by a successor, and let go.
	held := r.request()
	held.StayPaused = true
	_, err := c.Capture(ctx(t), held)
	must(t, err)
	b.killMonitor()
	c = b.ensure()
	r.c = c
	if rec := b.record(); rec.Phase != monitor.Held {
		t.Errorf("record %+v", rec)
	}
	settle(t, c, held.GetCheckpointId(), false, true)
	r.disk = append(r.disk, machine.Layer{ID: held.GetLayerId(), Path: held.GetLayerPath(), Format: "qcow2"})
	_, err = c.AwaitReady(ctx(t))
	must(t, err)
	awaitClock(t, c)

	// The successor's first is a superset, the next is small again.
	a := r.take(r.request())
	t.Logf("by a successor: %d MiB", a.GetChangedPages()/256)
	shell(t, c, "echo before >/root/before; sync")
	last := r.request()
	last.StayPaused = true
	a, err = c.Capture(ctx(t), last)
	must(t, err)
	t.Logf("the next: %d KiB", a.GetChangedPages()*4)
	r.keep(last)
	_, err = c.Kill(ctx(t))
	must(t, err)
	b.awaitDead()

	next := newRealBench(t)
	testRealContinued(t, next, r, filepath.Join(last.GetDir(), "devices"), pid)
}

// wantSmall logs the size of the monitor after captures, and holds it to 25 MiB.
func (r *realCaptures) wantSmall(c *monitor.Client) {
	st, err := c.Status(ctx(r.t))
	must(r.t, err)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", st.GetMonitorPid()))
	must(r.t, err)
	for line := range strings.Lines(string(status)) {
		var kb int
		if strings.HasPrefix(line, "VmRSS") || strings.HasPrefix(line, "RssAnon") || strings.HasPrefix(line, "VmHWM") {
			r.t.Log(strings.TrimSpace(line))
		}
		if _, err := fmt.Sscanf(line, "RssAnon: %d kB", &kb); err == nil && kb > 20<<10 {
			r.t.Errorf("%d KiB of memory", kb)
		}
	}
}

// testRealContinued goes on from the last capture as another machine.
func testRealContinued(t *testing.T, b *bench, r *realCaptures, devices, pid string) {
	run := &b.start.Config.Run
	old, oldErr := monitor.ReadConfig(r.dir)
	must(t, oldErr)
	run.Cmdline = old.Run.Cmdline
	run.Disk = r.disk // its top is empty and nobody else's
	run.Incoming = &machine.Incoming{MemoryFile: r.memory.Name(), DeviceState: devices, Checkpoint: r.parent}
	b.start.Config.Guest = monitor.Guest{Hostname: "other", MachineID: strings.Repeat("7b", 16)}
	began := time.Now()
	c, err := monitor.Start(ctx(t), b.start)
	must(t, err)
	t.Cleanup(c.Close)
	b.start.Config = nil
	t.Logf("continued after %s", time.Since(began).Round(time.Millisecond))
	for _, what := range []struct {
		name string
		seen func(*monitorv1.StatusResponse) bool
	}{{"linked", (*monitorv1.StatusResponse).GetLinked}, {"ready", (*monitorv1.StatusResponse).GetReady}} {
		err := c.Watch(ctx(t), func(st *monitorv1.StatusResponse) error {
			if what.seen(st) {
				return errEnough
			}
			return nil
		})
		if err != errEnough {
			t.Fatal(err)
		}
		t.Logf("%s after %s", what.name, time.Since(began).Round(time.Millisecond))
	}
	awaitClock(t, c)
	if got := shell(t, c, "hostname; cat /etc/machine-id /root/before; kill -0 "+pid+" && echo alive"); got != "other\n"+strings.Repeat("7b", 16)+"\nbefore\nalive" {
		t.Errorf("guest is %q", got)
	}
	tick := shell(t, c, "cat /run/tick")
	if now := shell(t, c, "sleep 1; cat /run/tick"); now == tick {
		t.Errorf("the ticker stands still at %s", tick)
	}
	// Killed while it continues, a successor goes on; its own captures are small.
	b.killMonitor()
	c = b.ensure()
	st, err := c.AwaitReady(ctx(t))
	must(t, err)
	again := newRealCaptures(b, c)
	again.count, again.parent = r.count, r.parent
	a := again.take(again.request())
	t.Logf("captured again: %d MiB", a.GetChangedPages()/256)
	b.reboot(c, st.GetRunId())
	if got := shell(t, c, "hostname; cat /root/before"); got != "other\nbefore" {
		t.Errorf("after the reboot: %q", got)
	}
	a = again.take(again.request()) // since one of before the reboot
	if a.GetChangedPages() != run.MemoryBytes/dirty.PageSize {
		t.Errorf("%d pages", a.GetChangedPages())
	}
	_, err = c.Kill(ctx(t))
	must(t, err)
	b.awaitDead()
}
