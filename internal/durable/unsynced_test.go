package durable_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/durable/durabletest"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestUnsyncedStepsWaitForNothing(t *testing.T) {
	dir := t.TempDir()
	var fs durable.FS
	rec := durabletest.Record(&fs, dir)
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	must(t, os.WriteFile(a, []byte("x"), 0o600))
	must(t, fs.RenameUnsynced(a, b))
	if got, err := os.ReadFile(b); err != nil || string(got) != "x" {
		t.Errorf("after the rename: %q, %v", got, err)
	}
	if err := fs.RenameUnsynced(a, b); !errdefs.Is(err, errdefs.Storage) {
		t.Errorf("rename what is gone: %v", err)
	}
	must(t, fs.RemoveUnsynced(b))
	must(t, fs.RemoveUnsynced(b)) // gone already
	if _, err := os.Stat(b); err == nil {
		t.Error("it is still there")
	}
	want := "rename a -> b\nrename a -> b\nremove b\nremove b\n"
	if got := rec.String(); got != want {
		t.Errorf("steps:\n%s", got)
	}
}
