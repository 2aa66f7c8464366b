//go:build linux

package agent_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/agent"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func goOn(t *testing.T, m *machine, req *agentv1.ContinueRequest) error {
	t.Helper()
	_, err := m.Continue(testCtx(t), connect.NewRequest(req))
	return err
}

// offset is by how much the guest's clock is ahead, to the length of a call.
func offset(t *testing.T, m *machine) time.Duration {
	t.Helper()
	before := time.Now()
	r, err := m.Ping(testCtx(t), connect.NewRequest(&agentv1.PingRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	return time.Unix(0, r.Msg.GetUnixNano()).Sub(before.Add(time.Since(before) / 2))
}

func TestContinue(t *testing.T) {
	m := newMachine(t)
	entropy := make([]byte, 32)
	next := &agentv1.ContinueRequest{Hostname: "web-2", MachineId: strings.Repeat("2", 32), Entropy: entropy}
	wantKind(t, goOn(t, m, next), errdefs.WrongState)
	conf := &agentv1.ConfigureRequest{Hostname: "web", MachineId: strings.Repeat("1", 32)}
	if _, err := m.Configure(testCtx(t), connect.NewRequest(conf)); err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string]*agentv1.ContinueRequest{
		"little entropy": {Entropy: entropy[:31]},
		"no entropy":     {Hostname: "x"},
		"host name":      {Hostname: "a b", Entropy: entropy},
		"machine id":     {MachineId: "F" + strings.Repeat("0", 31), Entropy: entropy},
	} {
		t.Run(name, func(t *testing.T) { wantKind(t, goOn(t, m, bad), errdefs.Invalid) })
	}
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"cat"}})
	for range 2 {
		if err := goOn(t, m, next); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"etc/hostname": "web-2\n", "etc/machine-id": strings.Repeat("2", 32) + "\n",
		"etc/hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 web-2\n",
	} {
		if b, err := os.ReadFile(filepath.Join(m.world, name)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	stdin(t, st, "runs on\n")
	until(t, st, "runs on\n")
	_ = st.CloseRequest()
	finish(t, st)

	// The same machine keeps what it has made of its names.
	own := filepath.Join(m.world, "etc/hostname")
	if err := os.WriteFile(own, []byte("own\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(m.world, "etc/machine-id")); err != nil {
		t.Fatal(err)
	}
	if err := goOn(t, m, next); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(own); err != nil || string(b) != "own\n" {
		t.Errorf("hostname: %q, %v", b, err)
	}
	if _, err := os.Stat(filepath.Join(m.world, "etc/machine-id")); !os.IsNotExist(err) {
		t.Errorf("machine-id is there again: %v", err)
	}

	// It is now what it was told last, also to Configure.
	_, err := m.Configure(testCtx(t), connect.NewRequest(conf))
	wantKind(t, err, errdefs.WrongState)
	conf.Hostname, conf.MachineId = next.GetHostname(), next.GetMachineId()
	if _, err := m.Configure(testCtx(t), connect.NewRequest(conf)); err != nil {
		t.Error(err)
	}
}

func TestClock(t *testing.T) {
	m := configured(t)
	near := func(want time.Duration) {
		t.Helper()
		if got := offset(t, m); (got - want).Abs() > 5*time.Second {
			t.Errorf("the clock is %s off, want %s", got, want)
		}
	}
	step := func(d time.Duration) {
		t.Helper()
		if _, err := m.StepClock(testCtx(t), connect.NewRequest(&agentv1.StepClockRequest{DeltaNano: int64(d)})); err != nil {
			t.Fatal(err)
		}
	}
	near(0)
	step(-time.Hour)
	near(-time.Hour)
	step(3 * time.Hour)
	near(2 * time.Hour)
	yesterday := time.Now().Add(-24 * time.Hour)
	if err := goOn(t, m, &agentv1.ContinueRequest{UnixNano: yesterday.UnixNano(), Entropy: make([]byte, 32)}); err != nil {
		t.Fatal(err)
	}
	near(-24 * time.Hour)
	step(-offset(t, m))
	near(0)
	if err := goOn(t, m, &agentv1.ContinueRequest{Entropy: make([]byte, 32)}); err != nil {
		t.Fatal(err)
	}
	near(0)
}

// TestContinued: an agent that begins as a configured one accepts work and
// Continue at once, and has written nothing.
func TestContinued(t *testing.T) {
	m := serve(t, func(cfg *agent.Config) { cfg.Continued = &agentv1.ConfigureRequest{Hostname: "old"} })
	if r := sh(t, m, "ls -a | wc -l"); strings.TrimSpace(r.stdout) != "2" {
		t.Errorf("the world holds %q entries", r.stdout)
	}
	if err := goOn(t, m, &agentv1.ContinueRequest{Hostname: "new", Entropy: make([]byte, 32)}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Configure(testCtx(t), connect.NewRequest(&agentv1.ConfigureRequest{Hostname: "new"})); err != nil {
		t.Error(err)
	}
}
