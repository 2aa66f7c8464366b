package tarstream_test

import (
	"bytes"
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/tarstream"
)

// What is asked for by name and cannot be carried is an error, not nothing.
func TestSpecialSource(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(dir, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.Symlink("fifo", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for name, what := range map[string]string{
		filepath.Join(dir, "fifo"): "pipe", filepath.Join(dir, "link"): "pipe", filepath.Join(dir, "socket"): "socket", "/dev/null": "device",
	} {
		err := tarstream.Pack(context.Background(), &bytes.Buffer{}, name)
		if !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), what) {
			t.Errorf("pack %s: %v, want INVALID that says %s", name, err, what)
		}
	}
}

// The kernel's files tell a size of 0 and have content.
func TestSizeless(t *testing.T) {
	const name = "/proc/version"
	if fi, err := os.Stat(name); err != nil || fi.Size() != 0 {
		t.Skipf("%s: %v, %v", name, fi, err)
	}
	dst := filepath.Join(t.TempDir(), "copy")
	res, err := tarstream.UnpackAs(context.Background(), bytes.NewReader(pack(t, name)), dst, tarstream.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if want := read(t, name); want == "" || read(t, dst) != want || res.Bytes != uint64(len(want)) {
		t.Errorf("result %+v, content %q, want %q", res, read(t, dst), want)
	}
}
