package home_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
)

func TestDefault(t *testing.T) {
	t.Setenv("HOLDPOINT_HOME", "/x/y")
	if dir, err := home.Default(); err != nil || dir != "/x/y" {
		t.Fatalf("Default() = %q, %v", dir, err)
	}
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "hp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestOpenShortHomeKeepsSocketsInside(t *testing.T) {
	dir := shortDir(t)
	h, err := home.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(h.Socket(), dir) || len(h.RunSockets("0123456789abcdef")) > 100 {
		t.Errorf("socket %s", h.Socket())
	}
	if err := h.Create(); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(h.Layers(), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := h.Create(); !errdefs.Is(err, errdefs.Denied) {
		t.Errorf("create over a folder open to others: %v, want DENIED", err)
	}
}

func TestOpenLongHome(t *testing.T) {
	long := filepath.Join(shortDir(t), strings.Repeat("d", 90))
	t.Setenv("XDG_RUNTIME_DIR", "")
	if _, err := home.Open(long); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("open without a runtime folder: %v, want INVALID", err)
	}
	runtime := shortDir(t)
	t.Setenv("XDG_RUNTIME_DIR", runtime)
	h, err := home.Open(long)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(h.Socket(), runtime) {
		t.Errorf("socket %s is not below %s", h.Socket(), runtime)
	}
	if err := os.Chmod(runtime, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := home.Open(long); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("open with a runtime folder open to others: %v, want INVALID", err)
	}
}

func TestCreateRefusesASymlink(t *testing.T) {
	dir := shortDir(t)
	link := dir + "-link"
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(link) })
	h, err := home.Open(link)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Create(); !errdefs.Is(err, errdefs.Denied) {
		t.Errorf("create a linked home: %v, want DENIED", err)
	}
}
