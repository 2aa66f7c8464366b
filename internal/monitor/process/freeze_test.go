//go:build linux

package process_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	guestfreeze "github.com/holdpoint/holdpoint/internal/agent/freeze"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// doubleFS is the double's file system; it writes down what is done to it.
type doubleFS struct{ dir string }

func (d doubleFS) Name() string { return "/" }
func (d doubleFS) Sync() error  { return nil }
func (d doubleFS) Close() error { return nil }

func (d doubleFS) Freeze() error {
	if has(d.dir, "freeze-waits") {
		event(d.dir, "freezing")
	}
	for has(d.dir, "freeze-waits") {
		time.Sleep(5 * time.Millisecond)
	}
	event(d.dir, "freeze")
	return nil
}

func (d doubleFS) Thaw() (bool, error) {
	event(d.dir, "thaw")
	return true, nil
}

// Freeze is the real one, of the double's file system.
func (g *guest) Freeze(ctx context.Context, stream *guestfreeze.Stream) error {
	if has(g.cfg.Dir, "old-agent") {
		return g.UnimplementedAgentServiceHandler.Freeze(ctx, stream)
	}
	f := guestfreeze.New(guestfreeze.Config{
		FileSystems: func() ([]guestfreeze.FileSystem, error) { return []guestfreeze.FileSystem{doubleFS{g.cfg.Dir}}, nil },
		Hooks: func(_ context.Context, verb string) error {
			if has(g.cfg.Dir, "hook-fails") {
				return errors.New(verb + " hook: exit status 1")
			}
			return nil
		},
	})
	err := f.Serve(ctx, stream)
	if err != nil {
		return connect.NewError(connect.CodeUnknown, err)
	}
	return nil
}

func top(id string) machine.Layer {
	return machine.Layer{ID: id, Path: "/l/" + id, Format: "qcow2"}
}

var freezing = &agentv1.FreezeStart{LimitMillis: 2000}

// wantFreezes holds that the guest is frozen no more, and how often it was.
func wantFreezes(t *testing.T, b *bench, want int) {
	t.Helper()
	for range 1000 {
		events := b.read("events.log")
		if strings.Count(events, "freeze\n") == want && strings.Count(events, "thaw\n") == want {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Errorf("want %d freezes, each with a thaw:\n%s", want, b.read("events.log"))
}

func TestSwitchAtRest(t *testing.T) {
	b := newBench(t)
	c := b.up()
	for _, id := range []string{"a", "b"} {
		resp, err := c.SwitchAtRest(ctx(t), top(id), freezing)
		must(t, err)
		if resp.GetThawed().GetFrozenNano() == 0 || resp.GetSwitchNano() == 0 || resp.GetThawed().GetFrozenNano() < resp.GetSwitchNano() {
			t.Errorf("times %v", resp)
		}
	}
	wantDisk(t, b, c, "base", "top", "a", "b")
	wantFreezes(t, b, 2)
	if events := b.read("events.log"); strings.Count(events, "freeze\nswitch a\nthaw\n")+strings.Count(events, "freeze\nswitch b\nthaw\n") != 2 {
		t.Errorf("events %s", events)
	}
	if !b.running() {
		t.Error("the machine does not run")
	}

	b.fault("hook-fails", "")
	if _, err := c.SwitchAtRest(ctx(t), top("c"), freezing); err == nil || !strings.Contains(err.Error(), "freeze hook: exit status 1") {
		t.Errorf("with a hook that fails: %v", err)
	}
	wantDisk(t, b, c, "base", "top", "a", "b")
	resp, err := c.SwitchAtRest(ctx(t), top("c"), &agentv1.FreezeStart{LimitMillis: 2000, AllowHookFailure: true})
	must(t, err)
	if failure := resp.GetThawed().GetHookFailure(); !strings.Contains(failure, "freeze hook: exit status 1") || !strings.Contains(failure, "thaw hook") {
		t.Errorf("hook failure %q", failure)
	}
	wantDisk(t, b, c, "base", "top", "a", "b", "c")
}

func TestSwitchAtRestThatIsRefused(t *testing.T) {
	b := newBench(t)
	c := b.up()
	wantKind := func(what string, kind errdefs.Kind, layer string) {
		t.Helper()
		if _, err := c.SwitchAtRest(ctx(t), top(layer), freezing); !errdefs.Is(err, kind) {
			t.Errorf("%s: %v, want %s", what, err, kind)
		}
		wantDisk(t, b, c, "base", "top")
	}
	wantKind("a layer of the disk", errdefs.Conflict, "top")
	b.fault("old-agent", "")
	wantKind("an agent without freezes", errdefs.Unsupported, "a")
	must(t, c.Pause(ctx(t)))
	wantKind("a paused machine", errdefs.WrongState, "a")
	wantFreezes(t, b, 0)
}

func TestSwitchAtRestThatFails(t *testing.T) {
	b := newBench(t)
	c := b.up()
	b.fault("switch-fails", "")
	if _, err := c.SwitchAtRest(ctx(t), top("a"), freezing); err == nil {
		t.Error("the switch succeeds")
	}
	wantDisk(t, b, c, "base", "top")
	wantFreezes(t, b, 1)
	b.unfault("switch-fails")

	// A switch that takes longer than the limit was not made at rest.
	b.fault("switch-waits", "")
	failed := make(chan error, 1)
	go func() {
		_, err := c.SwitchAtRest(ctx(t), top("a"), &agentv1.FreezeStart{LimitMillis: 50})
		failed <- err
	}()
	wantFreezes(t, b, 2)
	b.unfault("switch-waits")
	if err := <-failed; err == nil {
		t.Error("a guest that had thawed was at rest")
	}

	// A caller that goes away while the guest freezes leaves it thawed.
	b.fault("freeze-waits", "")
	leaving, leave := context.WithCancel(ctx(t))
	go func() {
		_, err := c.SwitchAtRest(leaving, top("b"), freezing)
		failed <- err
	}()
	for !strings.Contains(b.read("events.log"), "freezing\n") {
		time.Sleep(5 * time.Millisecond)
	}
	leave()
	if err := <-failed; !errdefs.Is(err, errdefs.Interrupted) {
		t.Errorf("left: %v", err)
	}
	b.unfault("freeze-waits")
	for range 1000 { // until the guest has found out
		if events := b.read("events.log"); strings.Count(events, "freeze\n") == strings.Count(events, "thaw\n") {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	_, err := c.SwitchAtRest(ctx(t), top("c"), freezing)
	must(t, err)
	if rec, err := monitor.ReadRecord(b.dir); err != nil || rec.Switching || rec.Disk[len(rec.Disk)-1].ID != "c" {
		t.Errorf("record %+v, %v", rec, err)
	}
}

func TestMonitorDiesWhileTheGuestIsFrozen(t *testing.T) {
	b := newBench(t)
	c := b.up()
	b.fault("die-before-switch", "")
	if _, err := c.SwitchAtRest(ctx(t), top("a"), freezing); !errors.Is(err, monitor.ErrGone) {
		t.Fatalf("switch: %v", err)
	}
	c = b.ensure()
	_, err := c.AwaitReady(ctx(t))
	must(t, err)
	wantFreezes(t, b, 1)
	wantDisk(t, b, c, "base", "top", "a") // booting from it is right, and the successor has made it so
	if rec, err := monitor.ReadRecord(b.dir); err != nil || rec.Switching {
		t.Errorf("record %+v, %v", rec, err)
	}
	if _, err := c.SwitchAtRest(ctx(t), top("a"), freezing); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("the same again: %v", err)
	}
	_, err = c.SwitchAtRest(ctx(t), top("b"), freezing)
	must(t, err)
	wantDisk(t, b, c, "base", "top", "a", "b")
	if !b.running() {
		t.Error("the machine does not run")
	}
}
