package vm_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// systemdVariable names the folder of an image like that of imageVariable whose
// machines have systemd as their init.
const systemdVariable = "HOLDPOINT_TEST_IMAGE_SYSTEMD"

// TestSystemd takes a machine whose init is systemd through its life, and what
// systemd keeps of its own through checkpoints.
func TestSystemd(t *testing.T) {
	prepared(t)
	image := os.Getenv(systemdVariable)
	if image == "" {
		t.Skipf("%s is not set; run make test-systemd", systemdVariable)
	}
	a := newAlive(t)
	if err := putImage(a.Session, image, "debian-systemd"); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	a.Must(t, "run", "web", "--image", "debian-systemd", "--memory", "320M", "--on-boot", onBoot)
	answered := time.Since(begun)
	a.awaitUp(t, "web")
	t.Logf("answered after %.1f s, up after %.1f s", answered.Seconds(), time.Since(begun).Seconds())
	a.says(t, "web", "/proc/1/comm of the first boot", "systemd", "cat /proc/1/comm")
	a.hasBooted(t, "web", 1)
	a.says(t, "web", "what is in memory only", "/dev/shm /run", // and below /run
		"echo $(findmnt -rn -t tmpfs -o TARGET | grep -v ^/run/ | sort)")

	for _, step := range []struct {
		name string
		test func(*testing.T)
	}{
		{"agent", a.testSystemdAgent},
		{"console", a.testSystemdConsole},
		{"checkpoints", a.testSystemdCheckpoints},
		{"boots", a.testSystemdBoots},
	} {
		if !t.Run(step.name, step.test) {
			return
		}
	}
	a.Must(t, "rm", "web", "--force")
	a.clean(t)
}

// TestNoSystemd: an image without an init of its own is refused where it boots.
func TestNoSystemd(t *testing.T) {
	a := newAlive(t)
	r, err := a.Run("run", "web", "--image", "debian", "--memory", "256M", "--init", "system")
	if err != nil || r.Code == 0 || !strings.Contains(r.Stderr, "use --init=agent") {
		t.Errorf("got %+v, %v", r, err)
	}
	if list := a.Must(t, "ls", "--quiet"); list != "" {
		t.Errorf("it is there: %s", list)
	}
	a.clean(t)
}

// onBoot writes a line, and has what a unit's file could read in another way.
const onBoot = "# it's \"here\", 100%\nprintf \"up $((40+2))%%\\n\" >>/root/boots"

// hasBooted wants the on-boot command to have run at each of so many boots.
func (a alive) hasBooted(t testing.TB, machine string, boots int) {
	t.Helper()
	want := strings.TrimSpace(strings.Repeat("up 42% ", boots))
	a.says(t, machine, "the on-boot command", want, fmt.Sprintf("until [ $(cat /root/boots | wc -l) -ge %d ]; do sleep 0.1; done; echo $(cat /root/boots)", boots))
}

// sh runs a shell's command in a machine.
func (a alive) sh(t testing.TB, machine, command string) string {
	t.Helper()
	return strings.TrimSpace(a.Must(t, "exec", machine, "--", "sh", "-c", command))
}

func (a alive) says(t testing.TB, machine, what, want, command string) {
	t.Helper()
	if got := a.sh(t, machine, command); got != want {
		t.Errorf("%s in %s: %q, want %q", what, machine, got, want)
	}
}

// awaitUp waits until systemd has started all, and wants all well.
func (a alive) awaitUp(t testing.TB, machine string) {
	t.Helper()
	// On a busy host systemd may not answer in time, which is "unknown".
	a.says(t, machine, "the system", "running", `s=unknown
		while [ $s = unknown ]; do s=$(systemctl is-system-running --wait); done
		[ $s = running ] || systemctl --failed; echo $s`)
}

// testSystemdAgent does what ends ordinary services, and ordinary processes.
func (a alive) testSystemdAgent(t *testing.T) {
	const agent = "pgrep -xf @holdpoint-agent"
	pid := a.sh(t, "web", agent)
	a.says(t, "web", "the agent's OOM score", "-1000", "cat /proc/"+pid+"/oom_score_adj")
	a.says(t, "web", "the agent's program", "/run/initramfs/holdpoint-agent", "readlink /proc/"+pid+"/exe")
	// A command, and an orphan of one.
	a.Must(t, "exec", "web", "--detach", "--", "sleep", "1111")
	a.sh(t, "web", "(sleep 2222 >/dev/null 2>&1 &)")
	a.says(t, "web", "the parents of a command and of an orphan", pid+" 1", "echo $(ps -o ppid= -p $(pgrep -f 'sleep 111[1]')) $(ps -o ppid= -p $(pgrep -f 'sleep 222[2]'))")
	if r, err := a.Run("exec", "web", "--", "python3", "-c", "x = [b'x' * (8<<20) for _ in range(64)]"); err != nil || r.Code != 137 {
		t.Errorf("what takes all memory: %+v, %v; want it killed", r, err)
	}
	a.says(t, "web", "the scope of the agent", "active", "systemctl is-active init.scope")
	a.sh(t, "web", "systemctl daemon-reexec")
	a.sh(t, "web", "systemctl isolate rescue.target")
	a.says(t, "web", "services in rescue mode", "inactive", "systemctl is-active nginx || true")
	a.says(t, "web", "what goes on in rescue mode", "2", "pgrep -fc 'sleep (1111|2222)$'")
	a.sh(t, "web", "systemctl default")
	a.awaitUp(t, "web")
	a.says(t, "web", "the agent", pid, agent)
	a.says(t, "web", "zombies", "0", "ps -eo stat= | grep -c ^Z || true")
}

// testSystemdConsole: who is at the console gets in by Enter, as without systemd.
func (a alive) testSystemdConsole(t *testing.T) {
	s := sit(t, a, "web")
	s.types("\r")
	s.sees("# ")
	s.types("echo $(id -un) at $(tty)\r")
	s.sees("root at /dev/ttyS0")
	s.types("exit\r\x10\x11")
	s.sees("left the console of web")
	s.left(0)
}

// testSystemdCheckpoints: a timer, the journal and a user's session go on.
func (a alive) testSystemdCheckpoints(t *testing.T) {
	a.sh(t, "web", `useradd -m -s /bin/sh ann && loginctl enable-linger ann
		systemd-run -q --unit tick --on-active=1 --on-unit-active=1 --timer-property=AccuracySec=100ms sh -c 'echo tick >>/run/ticks'
		until systemctl -q is-active user@$(id -u ann); do sleep 0.2; done
		`+asAnn+`systemd-run -q --user --unit mine sh -c 'while sleep 0.5; do echo mine; done'
		logger -t story before`)
	a.sh(t, "web", ticks(0))
	begun := time.Now()
	for i := range 20 {
		a.checkpoint(t, "web", fmt.Sprintf("at-%d", i))
	}
	t.Logf("20 checkpoints: %.1f s", time.Since(begun).Seconds())
	counted := a.sh(t, "web", "logger -t story after; cat /run/ticks | wc -l")
	a.sh(t, "web", "while [ $(cat /run/ticks | wc -l) -le "+counted+" ]; do sleep 0.2; done")
	a.survived(t, "web", "before after")

	if c := a.checkpoint(t, "web", "ice", "--kind", "disk"); c.Checkpoint.Consistency != "frozen" {
		t.Errorf("checkpoint %+v", c)
	}
	a.survived(t, "web", "before after")
	a.Must(t, "fork", "ice", "--name", "cold")
	a.says(t, "cold-1", "the file system of a frozen checkpoint", "0", recovered)
	a.says(t, "cold-1", "the journal of the boot before", "after", "journalctl -q -b -1 -t story -o cat | tail -n1")
	a.Must(t, "rm", "cold-1", "--force")

	a.Must(t, "restore", "web", "at-10", "--full", "--yes")
	a.survived(t, "web", "before")
	a.checkClock(t, "web")
	a.Must(t, "fork", "at-15", "--name", "try")
	a.survived(t, "try-1", "before")
	a.checkClock(t, "try-1")
	a.says(t, "try-1", "host name", "try-1 try-1", "echo $(hostname) $(hostnamectl hostname)")
	if id := a.sh(t, "web", "cat /etc/machine-id"); id == a.sh(t, "try-1", "cat /etc/machine-id") {
		t.Errorf("the fork has its parent's machine id %s", id)
	}
	a.sh(t, "try-1", "logger -t story forked; journalctl --sync")
	a.says(t, "try-1", "the fork's journal", "before forked", journal)
	a.Must(t, "rm", "try-1", "--force")
}

// asAnn runs what follows as the user, with access to that one's systemd.
const asAnn = "runuser -u ann -- env XDG_RUNTIME_DIR=/run/user/$(id -u ann) "

const journal = "echo $(journalctl -q -b -t story -o cat)"

// ticks waits until the timer has gone off more often than that.
func ticks(than int) string {
	return fmt.Sprintf("until [ $(cat /run/ticks 2>/dev/null | wc -l) -gt %d ]; do sleep 0.2; done", than)
}

// survived wants the timer to go off, the user's session and service to run, and
// the journal to say what it said.
func (a alive) survived(t *testing.T, machine, said string) {
	t.Helper()
	a.sh(t, machine, "n=$(cat /run/ticks | wc -l); until [ $(cat /run/ticks | wc -l) -gt $n ]; do sleep 0.2; done")
	a.says(t, machine, "the user and the service", "lingering active", "echo $(loginctl show-user ann -p State --value) $("+asAnn+"systemctl --user is-active mine)")
	a.says(t, machine, "the journal", said, "journalctl --sync; "+journal)
}

// testSystemdBoots shuts down by all that it can be asked by, and boots again.
func (a alive) testSystemdBoots(t *testing.T) {
	a.sh(t, "web", "echo kept >/tmp/kept; logger -t first told; rm /root/boots")
	a.timed(t, "stopped checkpoint", "checkpoint", "create", "web", "--kind", "disk", "--mode", "stopped", "--stop-running", "--name", "off")
	a.awaitUp(t, "web")
	a.hasBooted(t, "web", 1)
	a.says(t, "web", "what was in /tmp", "kept", "cat /tmp/kept")
	a.says(t, "web", "the end of the boot before", "1", "journalctl -q -b -1 -o cat | grep -c 'Reached target.*[Pp]ower.*[Oo]ff'")

	a.timed(t, "stop", "stop", "web")
	a.hasEnded(t, "web", "clean shutdown")
	a.timed(t, "start", "start", "web")
	a.hasBooted(t, "web", 2)
	a.says(t, "web", "the journal of the first boot", "told", "journalctl -q -t first -o cat")

	booted := a.sh(t, "web", "cat /proc/sys/kernel/random/boot_id")
	_, _ = a.Run("exec", "web", "--", "reboot") // it may end over it
	await(t, func() error {
		if r, err := a.Run("exec", "web", "--", "cat", "/proc/sys/kernel/random/boot_id"); err != nil || r.Code != 0 || strings.TrimSpace(r.Stdout) == booted {
			return fmt.Errorf("it has not rebooted: %+v, %v", r, err)
		}
		return nil
	})
	a.hasBooted(t, "web", 3)
	_, _ = a.Run("exec", "web", "--", "poweroff")
	a.hasEnded(t, "web", "guest-shutdown")
}

// timed runs a verb and logs how long it took.
func (a alive) timed(t *testing.T, what string, args ...string) {
	t.Helper()
	begun := time.Now()
	a.Must(t, args...)
	t.Logf("%s: %.1f s", what, time.Since(begun).Seconds())
}

// hasEnded waits until a machine has stopped, and wants to know how it did.
func (a alive) hasEnded(t *testing.T, machine, exit string) {
	t.Helper()
	var m struct{ Machine struct{ State, Exit string } }
	await(t, func() error {
		if a.JSON(t, &m, "inspect", machine); m.Machine.State != "stopped" {
			return fmt.Errorf("it is %s", m.Machine.State)
		}
		return nil
	})
	if m.Machine.Exit != exit {
		t.Errorf("%s has ended by %q, not %q", machine, m.Machine.Exit, exit)
	}
}
