package machinetest_test

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

func (b *bench) fault(name, text string) {
	b.t.Helper()
	must(b.t, os.WriteFile(filepath.Join(b.faults, name), []byte(text), 0o600))
}

func (b *bench) noFault(name string) {
	b.t.Helper()
	must(b.t, os.Remove(filepath.Join(b.faults, name)))
}

// window opens one that keeps memory, devices and disk in files of a new
// folder, and gives what the run that continues from it needs.
func (b *bench) window(ctx context.Context, run machine.Run, w machine.Window) (machine.RunConfig, error) {
	b.t.Helper()
	memory, err := run.Memory(b.t.Context())
	must(b.t, err)
	defer memory.Close()
	next := b.config()
	next.Incoming = &machine.Incoming{
		MemoryFile: filepath.Join(b.t.TempDir(), "memory"), DeviceState: filepath.Join(b.t.TempDir(), "devices"), Checkpoint: "k",
	}
	next.Cmdline = ""
	top := b.overlay()
	w.Top = &top
	w.State, err = os.Create(next.Incoming.DeviceState)
	must(b.t, err)
	defer w.State.Close()
	w.Pages = func(context.Context) error {
		pages, err := memory.Arm()
		if err != nil {
			return err
		}
		return copyPages(next.Incoming.MemoryFile, b.memory, memory, pages)
	}
	if _, err := run.Window(ctx, w); err != nil {
		return next, err
	}
	b.chain = append(b.chain, top)
	next.Disk = append(b.chain[:len(b.chain)-1:len(b.chain)-1], b.overlay())
	return next, nil
}

// copyPages makes a memory file: the pages of memory, the others those of the
// file below, or zeros.
func copyPages(path, below string, memory io.ReaderAt, pages *dirty.Set) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if below != "" {
		b, err := os.Open(below)
		if err != nil {
			return err
		}
		defer b.Close()
		if _, err := io.CopyN(f, b, 1<<20); err != nil { // more than there is in it
			return err
		}
	}
	for offset, length := range pages.Runs() {
		page := make([]byte, length)
		if _, err := memory.ReadAt(page, offset); err != nil {
			return err
		}
		if _, err := f.WriteAt(page, offset); err != nil {
			return err
		}
	}
	return f.Truncate(pages.MemoryBytes())
}

func (b *bench) keep(run machine.Run, w machine.Window) machine.RunConfig {
	b.t.Helper()
	next, err := b.window(b.t.Context(), run, w)
	must(b.t, err)
	return next
}

var who = &agentv1.ConfigureRequest{
	Hostname: "web", MachineId: strings.Repeat("ab", 16), OnBoot: "echo booted >>run/boots", Tmpfs: []string{"/tmp"},
}

// sh runs a command in the guest, to its end, which has to be a good one.
func sh(t *testing.T, guest agentv1connect.AgentServiceClient, script string) string {
	t.Helper()
	stream := guest.Exec(t.Context())
	must(t, stream.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Start{Start: &agentv1.ExecStart{Argv: []string{"sh", "-c", script}}}}))
	var out bytes.Buffer
	for {
		msg, err := stream.Receive()
		must(t, err)
		out.Write(msg.GetStdout())
		out.Write(msg.GetStderr())
		if exit := msg.GetExit(); exit != nil {
			if exit.GetCode() != 0 {
				t.Fatalf("%s: exit code %d: %s%s", script, exit.GetCode(), exit.GetError(), out.String())
			}
			must(t, stream.CloseRequest())
			return out.String()
		}
	}
}

func configure(t *testing.T, guest agentv1connect.AgentServiceClient) {
	t.Helper()
	_, err := guest.Configure(t.Context(), connect.NewRequest(who))
	must(t, err)
	for sh(t, guest, "cat run/boots 2>/dev/null || true") == "" { //nolint:revive // the command starts beside
	}
}

func ping(t *testing.T, guest agentv1connect.AgentServiceClient) (*agentv1.PingResponse, time.Duration) {
	t.Helper()
	begun := time.Now()
	pong, err := guest.Ping(t.Context(), connect.NewRequest(&agentv1.PingRequest{}))
	must(t, err)
	return pong.Msg, time.Unix(0, pong.Msg.GetUnixNano()).Sub(begun)
}

func TestContinuedGuestGoesOn(t *testing.T) {
	b := newBench(t)
	cfg := b.config()
	source := b.launch(cfg)
	must(t, source.Resume(t.Context()))
	guest, hangUp := dial(t, source)
	configure(t, guest)
	sh(t, guest, "mkdir -p run/d && echo 1 >run/d/a; ln -s a run/d/l; mkdir -p dev/shm tmp; echo 1 >dev/shm/b; echo 1 >tmp/c; chmod 700 tmp/c; echo 1 >disk")
	first, _ := ping(t, guest)
	next := b.keep(source, machine.Window{})
	sh(t, guest, "for f in run/d/a dev/shm/b tmp/c disk; do echo 2 >$f; done; echo 2 >run/later")
	hangUp()
	time.Sleep(20 * time.Millisecond) // by which the guest's clock will be behind

	run := b.launch(next)
	must(t, run.Resume(t.Context()))
	guest, _ = dial(t, run)
	pong, offset := ping(t, guest)
	if !pong.GetConfigured() || pong.GetBootId() != first.GetBootId() {
		t.Errorf("the guest says %v, at first %v", pong, first)
	}
	if offset > -20*time.Millisecond || offset < -time.Minute {
		t.Errorf("the guest's clock is %s off, it stood still for longer", offset)
	}
	_, err := guest.Continue(t.Context(), connect.NewRequest(&agentv1.ContinueRequest{
		Hostname: "fork", MachineId: strings.Repeat("cd", 16), UnixNano: time.Now().UnixNano(), Entropy: make([]byte, 32),
	}))
	must(t, err)
	if _, offset = ping(t, guest); offset.Abs() > time.Second {
		t.Errorf("the guest's clock is %s off after it was set", offset)
	}
	_, err = guest.StepClock(t.Context(), connect.NewRequest(&agentv1.StepClockRequest{DeltaNano: int64(time.Hour)}))
	must(t, err)
	if _, offset = ping(t, guest); (offset - time.Hour).Abs() > time.Second {
		t.Errorf("the guest's clock is %s off after a step of an hour", offset)
	}
	got := sh(t, guest, "cat run/d/a run/d/l dev/shm/b tmp/c disk run/boots etc/hostname; ls run/later 2>/dev/null; stat -c %a tmp/c")
	if want := "1\n1\n1\n1\n1\nbooted\nfork\n700\n"; got != want {
		t.Errorf("the guest has %q, want %q", got, want)
	}
	// And again, from the second: it knows its second name.
	again := b.launch(b.keepFrom(run, next))
	must(t, again.Resume(t.Context()))
	guest, _ = dial(t, again)
	_, err = guest.Configure(t.Context(), connect.NewRequest(&agentv1.ConfigureRequest{
		Hostname: "fork", MachineId: strings.Repeat("cd", 16), OnBoot: who.GetOnBoot(), Tmpfs: who.GetTmpfs(),
	}))
	must(t, err)
	if got := sh(t, guest, "cat run/boots"); got != "booted\n" {
		t.Errorf("boots are %q", got)
	}
}

// keepFrom is keep for a run with a chain of its own.
func (b *bench) keepFrom(run machine.Run, cfg machine.RunConfig) machine.RunConfig {
	b.t.Helper()
	b.chain, b.memory = cfg.Disk, cfg.Incoming.MemoryFile
	return b.keep(run, machine.Window{})
}

func TestGuestContinuesUnconfigured(t *testing.T) {
	b := newBench(t)
	source := b.launch(b.config())
	must(t, source.Resume(t.Context()))
	guest, _ := dial(t, source)
	ping(t, guest)
	next := b.keep(source, machine.Window{StayPaused: true})
	next.Incoming.Unconfigured = true
	run := b.launch(next)
	must(t, run.Resume(t.Context()))
	guest, _ = dial(t, run)
	if pong, _ := ping(t, guest); pong.GetConfigured() {
		t.Error("the guest was told who it is")
	}
	configure(t, guest)
}

func TestMemoryIsTheSameForTheSame(t *testing.T) {
	b := newBench(t)
	run := b.launch(b.config())
	must(t, run.Resume(t.Context()))
	guest, _ := dial(t, run)
	configure(t, guest)
	sh(t, guest, "echo same >run/f")
	first := b.keep(run, machine.Window{StayPaused: true})
	second := b.keep(run, machine.Window{WasPaused: true})
	if pages := differ(t, first, second); len(pages) > 0 {
		t.Errorf("pages %v of a paused guest changed", pages)
	}
	must(t, run.Resume(t.Context()))
	sh(t, guest, "rm run/f; echo same >run/f")
	if pages := differ(t, first, b.keep(run, machine.Window{})); !slices.Equal(pages, []int64{0}) {
		t.Errorf("pages %v of an idle guest changed, want the first only", pages)
	}
	sh(t, guest, "echo more >run/g; rm run/f")
	if pages := differ(t, first, b.keep(run, machine.Window{})); len(pages) < 2 {
		t.Errorf("only pages %v changed", pages)
	}
}

// differ gives the pages in which the memory files of two runs differ.
func differ(t *testing.T, a, b machine.RunConfig) (pages []int64) {
	t.Helper()
	x, err := os.ReadFile(a.Incoming.MemoryFile)
	must(t, err)
	y, err := os.ReadFile(b.Incoming.MemoryFile)
	must(t, err)
	for at := 0; at < len(x); at += dirty.PageSize {
		if !bytes.Equal(x[at:at+dirty.PageSize], y[at:at+dirty.PageSize]) {
			pages = append(pages, int64(at/dirty.PageSize))
		}
	}
	return pages
}

func TestWindowFaults(t *testing.T) {
	b := newBench(t)
	run := b.launch(b.config())
	must(t, run.Resume(t.Context()))
	running := func() {
		t.Helper()
		is, err := run.Running(t.Context())
		must(t, err)
		if !is {
			t.Fatal("the run stands still")
		}
	}
	for _, step := range []string{"stop", "devices", "switch", "pages", "resume"} {
		b.fault("window-fails", step+" no room")
		if _, err := b.window(t.Context(), run, machine.Window{}); err == nil || !strings.Contains(err.Error(), step+": no room") || strings.Contains(err.Error(), "\n") {
			t.Errorf("window that fails at %s: %v", step, err)
		}
		running()
		b.noFault("window-fails")
		if step == "resume" { // the switch was done
			continue
		}
		if step == "pages" { // which the deadline does not end
			continue
		}
		b.fault("window-waits", step)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		_, err := b.window(ctx, run, machine.Window{})
		cancel()
		wantKind(t, err, errdefs.OutcomeUnknown)
		b.noFault("window-waits")
		awaitRunning(t, run) // once it does not hang any more
	}
	b.launch(b.keep(run, machine.Window{}))
	for _, step := range []string{"stop", "devices", "switch", "resume"} {
		b.chain = b.chain[:2:2]
		run := b.launch(b.config())
		must(t, run.Resume(t.Context()))
		b.fault("window-dies", step)
		_, err := b.window(t.Context(), run, machine.Window{})
		wantKind(t, err, errdefs.WrongState)
		wantExit(t, run, machine.Crashed)
		b.noFault("window-dies")
	}
}

func awaitRunning(t *testing.T, run machine.Run) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		running, err := run.Running(t.Context())
		must(t, err)
		if running {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the run does not go on")
		}
	}
}

func TestFaultsOfMemory(t *testing.T) {
	b := newBench(t)
	run := b.launch(b.config())
	must(t, run.Resume(t.Context()))
	b.fault("memory-unsupported", "no kernel for it")
	_, err := run.Memory(t.Context())
	wantKind(t, err, errdefs.Unsupported)
	b.noFault("memory-unsupported")
	b.fault("memory-strategy", string(dirty.SoftDirty))
	memory, err := run.Memory(t.Context())
	must(t, err)
	_, err = memory.Arm()
	wantKind(t, err, errdefs.WrongState)
	must(t, run.Pause(t.Context()))
	_, err = memory.Scan()
	wantKind(t, err, errdefs.WrongState)
	_, err = memory.Arm()
	must(t, err)
	b.fault("memory-fails", "torn")
	if _, err := memory.Scan(); err == nil {
		t.Error("the scan worked")
	}
	b.noFault("memory-fails")
	must(t, memory.Close())
	_, err = memory.Scan()
	wantKind(t, err, errdefs.WrongState)
}

func TestWhatIsNotOfOneInstantIsNotLoaded(t *testing.T) {
	b := newBench(t)
	run := b.launch(b.config())
	must(t, run.Resume(t.Context()))
	guest, _ := dial(t, run)
	configure(t, guest)
	first := b.keep(run, machine.Window{})
	sh(t, guest, "echo 1 >disk")
	second := b.keep(run, machine.Window{})
	mixed := second
	mixed.Incoming = &machine.Incoming{MemoryFile: first.Incoming.MemoryFile, DeviceState: second.Incoming.DeviceState}
	_, err := b.fake.Launch(t.Context(), mixed)
	wantKind(t, err, errdefs.Storage)
	mixed = second
	mixed.Disk = first.Disk
	_, err = b.fake.Launch(t.Context(), mixed)
	wantKind(t, err, errdefs.Storage)
	for name, at := range map[string]int64{"in its image": 5000, "behind it": first.MemoryBytes - 1} {
		data, err := os.ReadFile(first.Incoming.MemoryFile)
		must(t, err)
		data[at] ^= 1
		mixed = first
		mixed.Incoming = &machine.Incoming{MemoryFile: filepath.Join(t.TempDir(), "m"), DeviceState: first.Incoming.DeviceState}
		must(t, os.WriteFile(mixed.Incoming.MemoryFile, data, 0o400))
		if _, err = b.fake.Launch(t.Context(), mixed); !errdefs.Is(err, errdefs.Storage) {
			t.Errorf("memory damaged %s: %v", name, err)
		}
	}
	b.fault("incoming-fails", "bad frame")
	_, err = b.fake.Launch(t.Context(), second)
	wantKind(t, err, errdefs.Storage)
	b.noFault("incoming-fails")
	must(t, b.launch(second).Resume(t.Context()))
}

func TestContinueFaults(t *testing.T) {
	b := newBench(t)
	run := b.launch(b.config())
	must(t, run.Resume(t.Context()))
	guest, _ := dial(t, run)
	configure(t, guest)
	next := b.launch(b.keep(run, machine.Window{}))
	must(t, next.Resume(t.Context()))
	guest, _ = dial(t, next)
	ask := func(ctx context.Context) error {
		_, err := guest.Continue(ctx, connect.NewRequest(&agentv1.ContinueRequest{Hostname: "fork", Entropy: make([]byte, 32)}))
		return err
	}
	b.fault("continue-fails.fork", "no entropy")
	if err := ask(t.Context()); err == nil || !strings.Contains(err.Error(), "no entropy") {
		t.Errorf("continue: %v", err)
	}
	b.noFault("continue-fails.fork")
	b.fault("continue-waits.fork", "")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := ask(ctx); connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("continue: %v", err)
	}
	b.noFault("continue-waits.fork")
	must(t, ask(t.Context()))
}

func TestPlatformFault(t *testing.T) {
	b := newBench(t)
	here, err := b.fake.Platform(t.Context(), b.config())
	must(t, err)
	b.fault("platform.web", `{"cpu": "other"}`)
	other, err := b.fake.Platform(t.Context(), b.config())
	must(t, err)
	wantKind(t, here.Check(other, "k", "restore"), errdefs.Incompatible)
}
