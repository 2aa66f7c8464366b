//go:build linux

package outlet

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/network/policy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// device is a run with a network device: each dial takes one of the answers.
type device struct {
	machine.Run
	answers chan error
	far     chan net.Conn
}

func (d *device) DialNetwork(ctx context.Context) (net.Conn, error) {
	select {
	case err := <-d.answers:
		if err != nil {
			return nil, err
		}
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	near, far := net.Pipe()
	d.far <- far
	return near, nil
}

// TestKeep: the device is connected when the guest may be let out, after a failure, and
// again when the connection has ended.
func TestKeep(t *testing.T) {
	o, err := New(&policy.Policy{Mode: policy.Internet}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	d := &device{answers: make(chan error, 3), far: make(chan net.Conn, 3)}
	ctx, cancel := context.WithCancel(t.Context())
	ready := make(chan struct{})
	var kept sync.WaitGroup
	kept.Go(func() {
		o.Keep(ctx, d, func(context.Context) error {
			<-ready
			return nil
		})
	})
	d.answers <- errors.New("nobody listens yet")
	d.answers <- nil
	select {
	case <-d.far:
		t.Error("the guest is let out before it is ready")
	default:
	}
	close(ready)
	_ = (<-d.far).Close()
	d.answers <- nil
	far := <-d.far
	cancel()
	kept.Wait()
	if _, err := far.Read(make([]byte, 1)); err == nil {
		t.Error("the connection stays")
	}
	if r, err := o.Refused(); err != nil || r.GetTotal() != 0 {
		t.Errorf("%v, %v", r, err)
	}
}

// TestNoNetwork: without a policy nothing is connected, whatever the run has.
func TestNoNetwork(t *testing.T) {
	o, err := New(nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	o.Keep(t.Context(), &device{}, func(context.Context) error {
		t.Error("it is asked for")
		return nil
	})
	if _, err := o.Refused(); !errdefs.Is(err, errdefs.WrongState) {
		t.Error(err)
	}
	if _, err := New(&policy.Policy{Mode: "x"}, nil); !errdefs.Is(err, errdefs.Invalid) {
		t.Error(err)
	}
	if told := Told(monitor.Guest{Hostname: "a"}, false); told.GetNetwork() != nil || told.GetHostname() != "a" {
		t.Error(told)
	}
	if told := Told(monitor.Guest{}, true); told.GetNetwork().GetAddresses()[0] != "198.18.0.2/30" {
		t.Error(told)
	}
}
