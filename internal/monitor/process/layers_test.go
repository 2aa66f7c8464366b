//go:build linux

package process_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// grown is a running machine whose disk has the layers base, top, a, b and c.
func grown(t *testing.T) (*bench, *monitor.Client) {
	b := newBench(t)
	c := b.up()
	must(t, c.Pause(ctx(t)))
	for _, id := range []string{"a", "b", "c"} {
		must(t, c.SwitchDisk(ctx(t), machine.Layer{ID: id, Path: "/l/" + id, Format: "qcow2"}))
	}
	must(t, c.Resume(ctx(t)))
	return b, c
}

func wantDisk(t *testing.T, b *bench, c *monitor.Client, want ...string) {
	t.Helper()
	st, err := c.Status(ctx(t))
	must(t, err)
	if diff := cmp.Diff(want, st.GetDisk()); diff != "" {
		t.Errorf("the disk of the status: %s", diff)
	}
	rec, err := monitor.ReadRecord(b.dir)
	must(t, err)
	if chain(rec.Disk) != strings.Join(want, ",") {
		t.Errorf("the disk of the record is %s", chain(rec.Disk))
	}
}

var merged = machine.Layer{ID: "m", Path: "/l/m", Format: "qcow2"}

func TestReplaceLayers(t *testing.T) {
	b, c := grown(t)
	must(t, c.ReplaceLayers(ctx(t), "top", "b", merged))
	must(t, c.ReplaceLayers(ctx(t), "top", "b", merged)) // changes nothing
	wantDisk(t, b, c, "base", "m", "c")
	if n := strings.Count(b.read("events.log"), "replace m\n"); n != 1 {
		t.Errorf("replaced %d times", n)
	}
	go b.tell("reset")
	done := errors.New("done")
	err := c.Watch(ctx(t), func(st *monitorv1.StatusResponse) error {
		if st.GetRunId() != "00000000000000aa" && st.GetReady() {
			return done
		}
		return nil
	})
	if !errors.Is(err, done) {
		t.Fatal(err)
	}
	if !strings.Contains(b.read("events.log"), "launch base,m,c\n") {
		t.Error("the guest was not rebooted from the shorter chain")
	}
}

func TestReplaceLayersThatFails(t *testing.T) {
	b, c := grown(t)
	for what, pair := range map[string][2]string{
		"the image": {"base", "a"}, "the top": {"a", "c"}, "in the wrong order": {"b", "a"}, "unknown": {"x", "b"},
	} {
		if err := c.ReplaceLayers(ctx(t), pair[0], pair[1], merged); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("replace %s: %v", what, err)
		}
	}
	b.fault("replace-fails", "")
	if err := c.ReplaceLayers(ctx(t), "top", "b", merged); err == nil {
		t.Error("replaced")
	}
	wantDisk(t, b, c, "base", "top", "a", "b", "c")
}

// TestMonitorDiesBeforeItReplaces repeats the call to the successor.
func TestMonitorDiesBeforeItReplaces(t *testing.T) {
	b, c := grown(t)
	b.fault("die-before-replace", "")
	if err := c.ReplaceLayers(ctx(t), "top", "b", merged); !errors.Is(err, monitor.ErrGone) {
		t.Fatalf("replace: %v", err)
	}
	c = b.ensure()
	wantDisk(t, b, c, "base", "top", "a", "b", "c")
	must(t, c.ReplaceLayers(ctx(t), "top", "b", merged))
	wantDisk(t, b, c, "base", "m", "c")
}
