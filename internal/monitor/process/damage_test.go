//go:build linux

package process_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

func (b *bench) living() []int {
	b.t.Helper()
	pids, err := monitor.Living(b.dir)
	must(b.t, err)
	return pids
}

// freeze stops all threads of a child of ours, and waits until they are.
func freeze(t *testing.T, pid int) {
	t.Helper()
	must(t, unix.Kill(pid, unix.SIGSTOP))
	must(t, unix.Waitid(unix.P_PID, pid, nil, unix.WSTOPPED|unix.WNOWAIT, nil))
}

func (b *bench) wantKilled() {
	b.t.Helper()
	if pids := b.living(); len(pids) > 0 {
		b.t.Errorf("living: %v", pids)
	}
	if alive, err := monitor.Alive(b.dir); err != nil || alive {
		b.t.Errorf("a monitor lives: %t, %v", alive, err)
	}
	rec, err := monitor.ReadRecord(b.dir)
	must(b.t, err)
	if rec.Phase != monitor.Exited || rec.Exit == nil || rec.Exit.Reason != machine.Killed || rec.Exit.Clean {
		b.t.Errorf("record %+v, exit %+v", rec, rec.Exit)
	}
	b.start.Config = nil
	if _, err := monitor.Ensure(ctx(b.t), b.start); b.read("config.json") != "damaged" && !errdefs.Is(err, errdefs.WrongState) {
		b.t.Errorf("ensure after the kill: %v", err)
	}
}

// TestLostRecord holds that a run whose record is gone is never begun again,
// nor taken for ended, as long as it lives and afterwards.
func TestLostRecord(t *testing.T) {
	for name, content := range map[string]string{"missing": "", "empty": `{"version": 1}`} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.up()
			pids := b.living()
			b.killMonitor()
			must(t, os.Remove(filepath.Join(b.dir, "record.json")))
			if content != "" {
				b.fault("record.json", content)
			}
			b.forgetEvents()
			for range 2 {
				if _, err := monitor.Ensure(ctx(t), b.start); !errdefs.Is(err, errdefs.OutcomeUnknown) || !strings.Contains(err.Error(), "a process of this run lives") {
					t.Fatalf("ensure: %v", err)
				}
			}
			if now := b.living(); len(now) != 1 || len(pids) != 1 || now[0] != pids[0] {
				t.Errorf("living before %v, after %v", pids, now)
			}
			must(t, unix.Kill(pids[0], unix.SIGKILL))
			must(t, monitor.AwaitEnd(ctx(t), pids[0]))
			if _, err := monitor.Ensure(ctx(t), b.start); !errdefs.Is(err, errdefs.OutcomeUnknown) || !strings.Contains(err.Error(), "its record is gone") {
				t.Fatalf("ensure after its death: %v", err)
			}
			if b.read("events.log") != "" {
				t.Errorf("events:\n%s", b.read("events.log"))
			}
			must(t, monitor.KillRun(ctx(t), nil, b.dir))
			b.wantKilled()
		})
	}
}

// TestRecordOfAnotherProcess holds that a record whose process has ended says
// nothing about one that lives.
func TestRecordOfAnotherProcess(t *testing.T) {
	b := newBench(t)
	b.up()
	b.killMonitor()
	rec, err := monitor.ReadRecord(b.dir)
	must(t, err)
	rec.Process.StartTime++
	must(t, monitor.WriteRecord(nil, b.dir, rec))
	if _, err := monitor.Ensure(ctx(t), b.start); err == nil {
		t.Fatal("ensure succeeds")
	}
	if now, err := monitor.ReadRecord(b.dir); err != nil || now.Phase != monitor.Running {
		t.Errorf("record %+v, %v", now, err)
	}
	must(t, monitor.KillRun(ctx(t), nil, b.dir))
	b.wantKilled()
}

// TestOrphanOfARebootIsEnded: the mark is that of the folder, not of a run id.
func TestOrphanOfARebootIsEnded(t *testing.T) {
	b := newBench(t)
	b.up()
	b.killMonitor()
	orphan := b.living()
	rec, err := monitor.ReadRecord(b.dir)
	must(t, err)
	rec.RunID, rec.Phase, rec.Process = "00000000000000cc", monitor.Booting, nil
	must(t, monitor.WriteRecord(nil, b.dir, rec))
	c := b.ensure()
	_, err = c.AwaitReady(ctx(t))
	must(t, err)
	if now := b.living(); len(now) != 1 || now[0] == orphan[0] {
		t.Errorf("orphan %v, living %v", orphan, now)
	}
}

func TestKillRunOfDamagedFolders(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		damage func(b *bench, monitorPID int)
	}{
		{"sound and answering", func(*bench, int) {}},
		{"config", func(b *bench, _ int) { b.fault("config.json", "damaged") }},
		{"record", func(b *bench, _ int) { b.fault("record.json", "damaged") }},
		{"record gone, monitor dead", func(b *bench, _ int) { b.killMonitor(); must(b.t, os.Remove(filepath.Join(b.dir, "record.json"))) }},
		{"everything, monitor stopped", func(b *bench, pid int) {
			b.fault("config.json", "damaged")
			b.fault("record.json", "damaged")
			freeze(b.t, pid)
		}},
		{"monitor stopped", func(b *bench, pid int) { freeze(b.t, pid) }},
		{"lock gone", func(b *bench, _ int) { must(b.t, os.Remove(filepath.Join(b.dir, "monitor.lock"))) }},
		{"adoption fails", func(b *bench, _ int) { b.fault("adopt-fails", ""); b.killMonitor() }},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			c := b.up()
			st, err := c.Status(ctx(t))
			must(t, err)
			test.damage(b, int(st.GetMonitorPid()))
			must(t, monitor.KillRun(ctx(t), nil, b.dir))
			b.wantKilled()
			if _, err := identify(int(st.GetMonitorPid())); err == nil {
				t.Error("the monitor lives")
			}
			must(t, monitor.KillRun(ctx(t), nil, b.dir))
		})
	}
	if err := monitor.KillRun(ctx(t), nil, "/nowhere"); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("no folder: %v", err)
	}
}

// TestKillRunKeepsAnEnd: what was recorded well is no less true afterwards.
func TestKillRunKeepsAnEnd(t *testing.T) {
	b := newBench(t)
	c := b.up()
	_, err := c.Shutdown(ctx(t), 10*time.Second)
	must(t, err)
	b.awaitDead()
	must(t, monitor.KillRun(ctx(t), nil, b.dir))
	rec, err := monitor.ReadRecord(b.dir)
	must(t, err)
	if !rec.Exit.Clean || rec.Exit.Reason != machine.GuestShutdown {
		t.Errorf("exit %+v", rec.Exit)
	}
}

// TestLivingFindsItsOwnOnly: neither the monitor, nor another folder's run, and
// by whichever path.
func TestLivingFindsItsOwnOnly(t *testing.T) {
	a, b := newBench(t), newBench(t)
	st, err := a.up().Status(ctx(t))
	must(t, err)
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(a.dir, link))
	for _, dir := range []string{a.dir, a.dir + "/", link} {
		if pids, err := monitor.Living(dir); err != nil || len(pids) != 1 || int64(pids[0]) != st.GetQemuPid() {
			t.Errorf("living of %q: %v, %v; want %d", dir, pids, err, st.GetQemuPid())
		}
	}
	if pids := b.living(); len(pids) != 0 {
		t.Errorf("living of a folder that has begun nothing: %v", pids)
	}
	if pid, err := monitor.Holder(a.dir); err != nil || int64(pid) != st.GetMonitorPid() {
		t.Errorf("holder %d, %v; want %d", pid, err, st.GetMonitorPid())
	}
}

// TestMonitorThatDoesNotAnswer holds the limits of our own, and those of ctx.
func TestMonitorThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	st, err := b.up().Status(ctx(t))
	must(t, err)
	freeze(t, int(st.GetMonitorPid()))
	began := time.Now()
	_, err = monitor.Ensure(ctx(t), b.start)
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("took %s", took)
	}
	holder := "process " + strings.TrimSpace(b.read("monitor.lock")) + " holds its lock"
	if !errdefs.Is(err, errdefs.Deadline) || !strings.Contains(err.Error(), holder) {
		t.Errorf("ensure: %v", err)
	}
	short, cancel := context.WithTimeout(ctx(t), 50*time.Millisecond)
	defer cancel()
	if _, err := monitor.Connect(short, b.dir); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("connect with a short deadline: %v", err)
	}
	must(t, unix.Kill(int(st.GetMonitorPid()), unix.SIGCONT))
	b.ensure()
}

// TestLockWithoutSocket: its holder is not a monitor that ever answers.
func TestLockWithoutSocket(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.up()
	b.killMonitor()
	must(t, os.RemoveAll(filepath.Join(b.dir, "monitor.sock")))
	lock, err := monitor.TakeLock(b.dir)
	must(t, err)
	defer lock.Close()
	if _, err := monitor.Ensure(ctx(t), b.start); !errdefs.Is(err, errdefs.Deadline) || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("ensure: %v", err)
	}
}

func TestSocketGetsItsNameAgain(t *testing.T) {
	b := newBench(t)
	b.start.Config.Run.SocketDir = filepath.Join(b.dir, "s")
	c := b.up()
	st, err := c.Status(ctx(t))
	must(t, err)
	for _, lose := range []func() error{
		func() error { return os.Remove(filepath.Join(b.dir, "s", "monitor.sock")) },
		func() error {
			return os.Rename(filepath.Join(b.dir, "s", "monitor.sock"), filepath.Join(b.dir, "other"))
		},
		func() error { return os.Rename(filepath.Join(b.dir, "s"), filepath.Join(b.dir, "t")) },
		func() (err error) { // the monitor makes it anew while it is being removed
			for range 1000 {
				if err = os.RemoveAll(filepath.Join(b.dir, "s")); err == nil {
					break
				}
			}
			return err
		},
	} {
		must(t, lose())
		next, err := b.ensure().Status(ctx(t))
		must(t, err)
		if next.GetMonitorPid() != st.GetMonitorPid() {
			t.Fatalf("before %v, after %v", st, next)
		}
	}
	if _, err := c.Status(ctx(t)); err != nil {
		t.Errorf("the old connection: %v", err)
	}
	_, err = c.Kill(ctx(t))
	must(t, err)
}

// TestGuestThatGoesAwayIsToldPlainly: whatever is under way ends with one
// error, of the code unavailable, in words for people.
func TestGuestThatGoesAwayIsToldPlainly(t *testing.T) {
	for word, why := range map[string]string{"crash": "its run has ended: crashed", "reset": "it rebooted"} {
		t.Run(word, func(t *testing.T) {
			b := newBench(t)
			c := b.up()
			running, _ := command(t, c)
			hung := make(chan error, 1)
			b.fault("shutdown-mode", "hang")
			go func() {
				_, err := c.Agent().Shutdown(ctx(t), connect.NewRequest(&agentv1.ShutdownRequest{}))
				hung <- err
			}()
			for !strings.Contains(b.read("events.log"), "asked to shut down") {
				time.Sleep(time.Millisecond)
			}
			b.tell(word)
			_, streamErr := running.Receive()
			for call, err := range map[string]error{"Exec": streamErr, "Shutdown": <-hung} {
				want := "the guest of machine m went away (" + why + ") while the call " + call + " was under way"
				if connect.CodeOf(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), want) {
					t.Errorf("%s: %v", call, err)
				}
			}
		})
	}
}

func TestMonitorThatGoesAwayIsToldPlainly(t *testing.T) {
	b := newBench(t)
	c := b.up()
	running, _ := command(t, c)
	b.killMonitor()
	_, err := running.Receive()
	if connect.CodeOf(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), "the monitor of machine m went away while the call Exec was under way") {
		t.Errorf("receive: %v", err)
	}
	if err := c.Pause(ctx(t)); !errors.Is(err, monitor.ErrGone) {
		t.Errorf("pause: %v", err)
	}
}

// TestPauseIsTakenBack: what failed is undone with time of its own, and the
// error of one that cannot be undone names the machine.
func TestPauseIsTakenBack(t *testing.T) {
	b := newBench(t)
	c := b.up()
	b.fault("pause-fails", "")
	b.fault("resume-fails", "")
	if err := c.Pause(ctx(t)); !errdefs.Is(err, errdefs.OutcomeUnknown) || !strings.Contains(err.Error(), "pause machine m: ") {
		t.Errorf("pause: %v", err)
	}
	must(t, os.Remove(filepath.Join(b.dir, "resume-fails")))
	must(t, os.Remove(filepath.Join(b.dir, "pause-fails")))
	must(t, c.Resume(ctx(t)))
	must(t, c.Pause(ctx(t)))
	b.fault("resume-fails", "")
	if err := c.Resume(ctx(t)); err == nil {
		t.Error("resume succeeds")
	}
	if rec, err := monitor.ReadRecord(b.dir); err != nil || rec.Phase != monitor.UserPaused || b.running() {
		t.Errorf("record %+v, %v", rec, err)
	}
	must(t, os.Remove(filepath.Join(b.dir, "resume-fails")))
	must(t, c.Resume(ctx(t)))
}
