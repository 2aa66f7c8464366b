//go:build linux

package fleet_test

import (
	"log/slog"
	"os"
	"testing"

	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/home"
)

// TestNeverBegun adopts a run that a killed daemon had recorded and made
// folders for, no more: it has ended, and no folder stays.
func TestNeverBegun(t *testing.T) {
	h, err := home.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	folders := []string{h.Run("r1"), h.RunSockets("r1")}
	for _, dir := range folders {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	f := fleet.New(fleet.Config{Home: h, Files: &durable.FS{}, MonitorCommand: []string{"/nonexistent"}, Log: slog.New(slog.DiscardHandler)})
	run := f.Adopt(t.Context(), "m1", "r1")
	if err := run.AwaitEnd(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.Close()
	for _, dir := range folders {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("folder %s is left: %v", dir, err)
		}
	}
}
