package machinetest_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest"
)

func TestMain(m *testing.M) {
	machinetest.FakeMain()
	goleak.VerifyTestMain(m)
}

const magic = "00112233445566778899aabbccddeeff"

// bench is a place for fake runs.
type bench struct {
	t      *testing.T
	dir    string
	faults string
	fake   *machinetest.Fake
	chain  []machine.Layer
	runs   int
	layers int
	// memory is the memory file of the run that is kept; empty for zeros.
	memory string
}

func newBench(t *testing.T) *bench {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "hpfake") // short enough for sockets
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	b := &bench{t: t, dir: dir, faults: filepath.Join(dir, "faults")}
	must(t, os.Mkdir(b.faults, 0o700))
	b.fake = machinetest.NewFake(machinetest.FakeConfig{Faults: b.faults})
	bottom := filepath.Join(dir, "root.img")
	must(t, os.WriteFile(bottom, nil, 0o600))
	b.chain = []machine.Layer{{ID: "image", Path: bottom, Format: "raw"}}
	b.chain = append(b.chain, b.overlay())
	return b
}

func (b *bench) overlay() machine.Layer {
	b.t.Helper()
	b.layers++
	id := fmt.Sprintf("layer%d", b.layers)
	path := filepath.Join(b.dir, id)
	must(b.t, machinetest.FakeOverlays{}.Create(b.t.Context(), path, 1<<30))
	return machine.Layer{ID: id, Path: path, Format: "qcow2"}
}

func (b *bench) config() machine.RunConfig {
	b.t.Helper()
	b.runs++
	id := fmt.Sprintf("%016x", b.runs)
	dir := filepath.Join(b.dir, id)
	must(b.t, os.Mkdir(dir, 0o700))
	return machine.RunConfig{
		RunID: id, Dir: dir, SocketDir: dir, MachineID: "m", MachineName: "web",
		MemoryBytes: machine.MinMemory, CPUs: 1, Cmdline: "holdpoint.magic=" + magic,
		Disk: b.chain, Accelerator: "tcg",
	}
}

func (b *bench) launch(cfg machine.RunConfig) machine.Run {
	b.t.Helper()
	run, err := b.fake.Launch(b.t.Context(), cfg)
	must(b.t, err)
	b.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := run.Kill(ctx); err != nil && !errdefs.Is(err, errdefs.WrongState) {
			b.t.Error(err)
		}
		must(b.t, run.Close())
	})
	return run
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t *testing.T, err error, kind errdefs.Kind) {
	t.Helper()
	if !errdefs.Is(err, kind) {
		t.Fatalf("error is %v, want one of kind %s", err, kind)
	}
}

func wantExit(t *testing.T, run machine.Run, reason machine.ExitReason) {
	t.Helper()
	select {
	case <-run.Exited():
	case <-time.After(10 * time.Second):
		t.Fatal("the run did not end")
	}
	if got := run.Exit().Reason; got != reason {
		t.Fatalf("exit is %q, want %q", got, reason)
	}
}

func TestFailedLaunchLeavesNothing(t *testing.T) {
	b := newBench(t)
	for name, spoil := range map[string]func(*machine.RunConfig){
		"fault":       func(*machine.RunConfig) { must(t, os.WriteFile(b.faults+"/launch-fails", []byte("no memory"), 0o600)) },
		"no kernel":   func(c *machine.RunConfig) { c.Kernel = b.dir + "/nokernel" },
		"no layer":    func(c *machine.RunConfig) { c.Disk = append(c.Disk[:1:1], machine.Layer{Path: b.dir + "/nolayer"}) },
		"wrong layer": func(c *machine.RunConfig) { c.Disk = []machine.Layer{c.Disk[0], c.Disk[0]} },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := b.config()
			spoil(&cfg)
			_, err := b.fake.Launch(t.Context(), cfg)
			if err == nil || strings.Contains(err.Error(), "\n") {
				t.Errorf("error is %q", err)
			}
			left, err := os.ReadDir(cfg.Dir)
			must(t, err)
			if len(left) > 0 {
				t.Errorf("left %v", left)
			}
			must(t, os.RemoveAll(b.faults+"/launch-fails"))
		})
	}
}

func TestCanceledLaunchLeavesNothing(t *testing.T) {
	b := newBench(t)
	must(t, os.WriteFile(b.faults+"/launch-waits", nil, 0o600))
	cfg := b.config()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := b.fake.Launch(ctx, cfg)
	wantKind(t, err, errdefs.Deadline)
	left, err := os.ReadDir(cfg.Dir)
	must(t, err)
	if len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

// dial begins a conversation with the guest.
func dial(t *testing.T, run machine.Run) (client agentv1connect.AgentServiceClient, hangUp func()) {
	t.Helper()
	m, err := link.ParseMagic(magic)
	must(t, err)
	conn, err := run.DialLink(t.Context())
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	conn, err = link.Host(ctx, conn, m)
	must(t, err)
	transport := &http.Transport{
		Protocols:   new(http.Protocols),
		DialContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil },
	}
	transport.Protocols.SetUnencryptedHTTP2(true)
	hangUp = func() {
		transport.CloseIdleConnections()
		conn.Close()
	}
	t.Cleanup(hangUp)
	return agentv1connect.NewAgentServiceClient(&http.Client{Transport: transport}, "http://guest"), hangUp
}

func TestPing(t *testing.T) {
	b := newBench(t)
	run := b.launch(b.config())
	must(t, run.Resume(t.Context()))
	for range 3 {
		guest, hangUp := dial(t, run)
		_, err := guest.Ping(t.Context(), connect.NewRequest(&agentv1.PingRequest{}))
		must(t, err)
		hangUp()
	}
	must(t, run.Pause(t.Context()))
	must(t, run.Kill(t.Context()))
	wantExit(t, run, machine.Killed)
}

// root is the folder that is the guest's disk.
func root(cfg machine.RunConfig) string { return filepath.Join(cfg.Dir, "root-"+cfg.RunID) }

func wantFile(t *testing.T, path, want string) {
	t.Helper()
	got, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		got = []byte("absent")
	} else {
		must(t, err)
	}
	if string(got) != want {
		t.Errorf("%s is %q, want %q", filepath.Base(path), got, want)
	}
}

func TestDiskFollowsTheChain(t *testing.T) {
	b := newBench(t)
	cfg := b.config()
	run := b.launch(cfg)
	must(t, run.Resume(t.Context()))
	must(t, os.WriteFile(root(cfg)+"/f", []byte("1"), 0o600))
	next := b.overlay()
	wantKind(t, run.SwitchDisk(t.Context(), next), errdefs.WrongState)
	must(t, run.Pause(t.Context()))
	if err := run.SwitchDisk(t.Context(), b.chain[0]); err == nil {
		t.Error("switched to the image")
	}
	must(t, run.SwitchDisk(t.Context(), next))
	must(t, run.Resume(t.Context()))
	must(t, os.WriteFile(root(cfg)+"/f", []byte("2"), 0o600))
	must(t, run.Pause(t.Context()))
	must(t, os.WriteFile(root(cfg)+"/lost", nil, 0o600))
	must(t, run.Kill(t.Context()))

	cfg = b.config() // without the new top
	run = b.launch(cfg)
	wantFile(t, root(cfg)+"/f", "1")
	must(t, run.Kill(t.Context()))
	b.chain = append(b.chain, next)
	cfg = b.config()
	b.launch(cfg)
	wantFile(t, root(cfg)+"/f", "2")
	wantFile(t, root(cfg)+"/lost", "absent")
}

func TestAnotherProcessAdoptsARun(t *testing.T) {
	b := newBench(t)
	cfg := b.config()
	run := b.launch(cfg)
	must(t, run.Resume(t.Context()))
	must(t, run.Pause(t.Context()))
	must(t, run.Close())
	other, err := b.fake.Adopt(t.Context(), cfg, run.Process())
	must(t, err)
	defer other.Close()
	running, err := other.Running(t.Context())
	must(t, err)
	if running {
		t.Error("the run goes on by itself")
	}
	must(t, other.Resume(t.Context()))
	wrong := run.Process()
	wrong.StartTime++
	_, err = b.fake.Adopt(t.Context(), cfg, wrong)
	wantKind(t, err, errdefs.NotFound)
	must(t, other.Kill(t.Context()))
	wantExit(t, other, machine.Killed)
	_, err = b.fake.Adopt(t.Context(), cfg, run.Process())
	wantKind(t, err, errdefs.NotFound)
	wantKind(t, other.Pause(t.Context()), errdefs.WrongState)
}

func TestKilledMachineTakesItsGuestAlong(t *testing.T) {
	b := newBench(t)
	cfg := b.config()
	run := b.launch(cfg)
	must(t, run.Resume(t.Context()))
	must(t, run.Pause(t.Context())) // stopped ones must go as well
	keeper, err := processes("keeper", cfg)
	must(t, err)
	guest, err := processes("guest", cfg)
	must(t, err)
	if len(keeper) != 1 || len(guest) != 1 {
		t.Fatalf("keepers %v, guests %v", keeper, guest)
	}
	must(t, syscall.Kill(run.Process().PID, syscall.SIGKILL))
	wantExit(t, run, machine.Crashed)
	for deadline := time.Now().Add(10 * time.Second); ; {
		left, err := processes("", cfg)
		must(t, err)
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("left: %v", left)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// processes are the living ones of a run in the role.
func processes(role string, cfg machine.RunConfig) (found []string, err error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		cmdline, _ := os.ReadFile(dir + "/cmdline")
		cwd, _ := os.Readlink(dir + "/cwd")
		if strings.HasPrefix(cwd, cfg.Dir) && len(cmdline) > 0 && strings.HasSuffix(string(cmdline), role+"\x00") {
			found = append(found, dir)
		}
	}
	return found, err
}
