package socket_test

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/holdpoint/holdpoint/internal/daemon/socket"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// reach connects until the deadline of the test says otherwise.
func reach(t *testing.T, path string) {
	t.Helper()
	for {
		conn, err := net.Dial("unix", path)
		if err == nil {
			conn.Close()
			return
		}
		select {
		case <-t.Context().Done():
			t.Fatal(err)
		case <-time.After(time.Millisecond):
		}
	}
}

func TestSocketIsBoundAgain(t *testing.T) {
	dir, err := os.MkdirTemp("/tmp", "hpsock")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "run", "d.sock")
	l, err := socket.Listen(socket.Config{Path: path, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					t.Error(err)
				}
				return
			}
			conn.Close()
		}
	}()
	reach(t, path)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	reach(t, path)
	if err := os.Rename(filepath.Dir(path), filepath.Join(dir, "gone")); err != nil {
		t.Fatal(err)
	}
	reach(t, path)
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	<-done
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
}
