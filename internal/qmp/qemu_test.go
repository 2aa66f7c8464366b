package qmp

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// startQEMU runs a QEMU without a machine, listening on the returned path.
func startQEMU(t *testing.T) string {
	t.Helper()
	bin, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		t.Skip("qemu-system-x86_64 is not installed")
	}
	dir, err := os.MkdirTemp("", "qmp")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	lf, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "-M", "none", "-nodefaults", "-no-user-config", "-display", "none", "-S",
		"-chardev", "socket,id=q,fd=3,server=on,wait=off", "-mon", "chardev=q,mode=control")
	cmd.ExtraFiles = []*os.File{lf}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = l.Close(), lf.Close()
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait(); _ = os.RemoveAll(dir) })
	return path
}

func TestRealQEMU(t *testing.T) {
	path := startQEMU(t)
	sub := NewSubscription()
	c, err := Dial(ctxOf(t), path, sub)
	if err != nil {
		t.Fatal(err)
	}
	if c.Version().Major < 4 {
		t.Errorf("version %+v", c.Version())
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			var st struct{ Status string }
			if err := c.Execute(ctxOf(t), "query-status", nil, &st); err != nil || st.Status != "prelaunch" {
				t.Errorf("status %q, %v", st.Status, err)
			}
		})
	}
	wg.Wait()
	var qe *Error
	if err := c.Execute(ctxOf(t), "no-such", nil, nil); !errors.As(err, &qe) || qe.Class != "CommandNotFound" {
		t.Errorf("unknown command: %v", err)
	}
	if err := c.Pipeline(ctxOf(t), Command{Name: "cont"}, Command{Name: "stop"}); err != nil {
		t.Errorf("pipeline: %v", err)
	}
	for _, want := range []string{Resume, Stop} {
		if e, err := sub.Next(ctxOf(t)); err != nil || e.Name != want {
			t.Errorf("event %q, %v; want %s", e.Name, err, want)
		}
	}
	passFiles(t, c)
	c.Close()

	// A client that dies in the middle of a line must not matter to the next.
	half, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = half.Write([]byte(`{"execute": "qmp_capabilities"}{"execute": "query-`))
	_ = half.Close()
	c, err = Dial(ctxOf(t), path, sub)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fresh := NewSubscription(Shutdown)
	c.Subscribe(fresh)
	_ = c.Execute(ctxOf(t), "quit", nil, nil)
	<-c.Done()
	if e, err := fresh.Next(ctxOf(t)); err != nil || !strings.Contains(string(e.Data), "host-qmp-quit") {
		t.Errorf("shutdown event %s, %v", e.Data, err)
	}
}

// passFiles passes many files at once; each must arrive as itself.
func passFiles(t *testing.T, c *Client) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			if err := c.AddFile(ctxOf(t), i, f); err != nil {
				t.Errorf("add-fd %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	if err := c.PassFile(ctxOf(t), "one", f); err != nil {
		t.Errorf("getfd: %v", err)
	}
	if err := c.Execute(ctxOf(t), "closefd", map[string]string{"fdname": "one"}, nil); err != nil {
		t.Errorf("closefd: %v", err)
	}
	var sets []struct {
		FDs []struct{ FD int }
	}
	if err := c.Execute(ctxOf(t), "query-fdsets", nil, &sets); err != nil || len(sets) != 10 {
		t.Errorf("%d fd sets, %v", len(sets), err)
	}
}
