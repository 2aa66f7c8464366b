//go:build linux

package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
	"github.com/holdpoint/holdpoint/internal/qemu/process"
)

// monitorDouble answers at a run's QMP socket as QEMU would.
type monitorDouble struct {
	t  *testing.T
	ln net.Listener

	mu     sync.Mutex
	status string
	conn   net.Conn
	asked  int
}

// newMonitorDouble is that of a run whose process is this one.
func newMonitorDouble(t *testing.T) (*monitorDouble, machine.Run) {
	dir, err := os.MkdirTemp("/tmp", "hpq")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	ln, err := net.Listen("unix", filepath.Join(dir, qmpSocket))
	must(t, err)
	d := &monitorDouble{t: t, ln: ln, status: "running"}
	var served sync.WaitGroup
	served.Go(d.serve)
	t.Cleanup(func() {
		must(t, ln.Close())
		d.cut()
		served.Wait()
	})
	q := New(Config{Host: host.New(host.Config{CacheDir: dir})})
	p, err := process.Open(os.Getpid())
	must(t, err)
	must(t, p.Close())
	r, err := q.Adopt(ctxOf(t), machine.RunConfig{RunID: "r", Dir: dir, SocketDir: dir}, p.ID())
	must(t, err)
	t.Cleanup(func() { must(t, r.Close()) })
	return d, r
}

func (d *monitorDouble) serve() {
	for {
		conn, err := d.ln.Accept()
		if err != nil {
			return
		}
		d.mu.Lock()
		d.conn = conn
		d.mu.Unlock()
		d.send(`{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": []}}`)
		for lines := bufio.NewScanner(conn); lines.Scan(); {
			d.answer(lines.Bytes())
		}
		_ = conn.Close()
	}
}

func (d *monitorDouble) answer(line []byte) {
	var q struct {
		Execute string
		ID      string
	}
	if err := json.Unmarshal(line, &q); err != nil {
		d.t.Error(err)
	}
	if q.Execute != "query-status" {
		d.send(`{"return": {}, "id": %q}`, q.ID)
		return
	}
	d.mu.Lock()
	status := d.status
	d.asked++
	d.mu.Unlock()
	d.send(`{"return": {"status": %q, "running": %t}, "id": %q}`, status, status == "running", q.ID)
}

func (d *monitorDouble) send(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, _ = fmt.Fprintf(d.conn, format+"\r\n", args...)
}

func (d *monitorDouble) become(status string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status = status
}

func (d *monitorDouble) cut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	_ = d.conn.Close()
}

// awaitAsked waits until the status was asked for n times.
func (d *monitorDouble) awaitAsked(n int) {
	d.t.Helper()
	for range 1000 {
		d.mu.Lock()
		asked := d.asked
		d.mu.Unlock()
		if asked >= n {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	d.t.Fatalf("the status was not asked for %d times", n)
}

const (
	writeFailed = `{"event": "BLOCK_IO_ERROR", "data": {"action": %q, "operation": "write", "nospace": true}, "timestamp": {"seconds": 1, "microseconds": 0}}`
	stopped     = `{"event": "STOP", "timestamp": {"seconds": 1, "microseconds": 0}}`
)

func watchStall(t *testing.T, r machine.Run) <-chan error {
	stalled := make(chan error, 1)
	go func() { stalled <- r.AwaitStall(ctxOf(t)) }()
	return stalled
}

func wantNone(t *testing.T, stalled <-chan error) {
	t.Helper()
	select {
	case err := <-stalled:
		t.Fatalf("a stall was seen: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
}

func TestStallIsSeen(t *testing.T) {
	d, r := newMonitorDouble(t)
	stalled := watchStall(t, r)
	d.awaitAsked(1)
	d.send(stopped) // of a capture, say: nothing is asked in its window
	d.send(writeFailed, "report")
	d.send(stopped)
	wantNone(t, stalled)
	d.mu.Lock()
	if d.asked != 1 {
		t.Errorf("the status was asked for %d times", d.asked)
	}
	d.mu.Unlock()
	d.send(writeFailed, "stop") // told before it stands still
	d.awaitAsked(2)
	wantNone(t, stalled)
	d.become("io-error")
	d.send(stopped)
	must(t, <-stalled)
	must(t, <-watchStall(t, r)) // it still stands
	d.become("running")
	again := watchStall(t, r)
	wantNone(t, again)
	d.become("io-error")
	d.send(stopped)
	d.send(writeFailed, "stop") // told after
	must(t, <-again)
}

func TestStallIsSeenAfterAReconnect(t *testing.T) {
	d, r := newMonitorDouble(t)
	stalled := watchStall(t, r)
	d.awaitAsked(1)
	d.become("io-error")
	d.cut()
	must(t, <-stalled)
}

func TestStallWatchEnds(t *testing.T) {
	d, r := newMonitorDouble(t)
	ctx, cancel := context.WithCancel(t.Context())
	stalled := make(chan error, 1)
	go func() { stalled <- r.AwaitStall(ctx) }()
	d.awaitAsked(1)
	cancel()
	if err := <-stalled; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	closed := watchStall(t, r)
	d.awaitAsked(2)
	must(t, r.Close())
	if err := <-closed; !errdefs.Is(err, errdefs.WrongState) {
		t.Error(err)
	}
}
