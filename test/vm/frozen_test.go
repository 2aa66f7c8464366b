package vm_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/test/session"
)

// writes is a program in the guest that writes one number after the other to its
// disk, and tells in memory when each was there.
const writes = `i=0; while :; do i=$((i+1)); echo $i >>/data; sync /data; echo "$i $(cut -d' ' -f1 /proc/uptime)" >>/run/written; done`

// recovered says how many file systems the guest has recovered when it booted.
const recovered = "dmesg | grep -c 'recovery complete' || :"

// A hook of the guest that says that it is there, and takes a moment.
const slowHook = `#!/bin/sh
test $1 = freeze || exit 0
touch /run/in-hook
sleep 1
`

// written is the last number that is on the disk for certain, and how long the
// longest wait for one was since the one before, in seconds.
func (a alive) written(t *testing.T, since int) (last int, wait float64) {
	t.Helper()
	var before float64
	for line := range strings.Lines(a.Must(t, "exec", "web", "--", "cat", "/run/written")) {
		var n int
		var at float64
		if _, err := fmt.Sscan(line, &n, &at); err != nil {
			break // it is being written
		}
		if before > 0 && n > since {
			wait = max(wait, at-before)
		}
		last, before = n, at
	}
	return last, wait
}

// goesOn holds that the guest writes.
func (a alive) goesOn(t *testing.T) {
	t.Helper()
	before, _ := a.written(t, 0)
	await(t, func() error {
		if now, _ := a.written(t, 0); now < before+3 {
			return errors.New("the guest does not write")
		}
		return nil
	})
}

// TestFrozen takes frozen checkpoints of a guest that writes and syncs all the
// time. Each has all that was on the disk for certain before it, and its file
// system is whole without its journal. Whoever goes away in the middle leaves a guest
// that goes on, by its own timer if need be.
func TestFrozen(t *testing.T) {
	a := newAlive(t)
	a.Must(t, "run", "web", "--image", "debian", "--memory", "256M")
	a.Must(t, "exec", "--detach", "web", "--", "sh", "-c", writes)
	a.Must(t, "exec", "web", "--", "sh", "-c", "until test -s /run/written; do sleep 0.1; done")
	a.goesOn(t)

	t.Run("whole", a.frozenIsWhole)
	a.Must(t, "exec", "web", "--", "sh", "-c", "mkdir -p /etc/holdpoint/hooks.d; cat >/etc/holdpoint/hooks.d/slow <<'EOF'\n"+slowHook+"EOF\nchmod +x /etc/holdpoint/hooks.d/slow")
	t.Run("hung monitor", a.monitorHangs)
	for _, victim := range []session.Victim{session.Daemon, session.Monitor} {
		t.Run(string(victim)+" killed", func(t *testing.T) {
			a.cutInHook(t, func() error { return a.Kill(victim) })
		})
	}
	t.Run("cancelled", func(t *testing.T) {
		a.cutInHook(t, func() error {
			a.Must(t, "operation", "cancel", "last")
			return nil
		})
	})
	a.Must(t, "exec", "web", "--", "rm", "/etc/holdpoint/hooks.d/slow")
	a.checkpoint(t, "web", "after-all", "--kind", "disk")
	a.goesOn(t)
	a.clean(t)
}

func (a alive) frozenIsWhole(t *testing.T) {
	var kept int
	for i := range 5 {
		kept, _ = a.written(t, 0)
		c := a.checkpoint(t, "web", fmt.Sprintf("f%d", i), "--kind", "disk")
		if c.Checkpoint.Consistency != "frozen" {
			t.Fatalf("checkpoint %+v", c)
		}
	}
	a.Must(t, "fork", "f4", "--name", "copy")
	last, err := strconv.Atoi(strings.TrimSpace(a.Must(t, "exec", "copy-1", "--", "tail", "-n1", "/data")))
	if err != nil || last < kept {
		t.Errorf("the checkpoint has numbers up to %d, %v; %d was on the disk before it", last, err, kept)
	}
	if got := a.Must(t, "exec", "copy-1", "--", "sh", "-c", recovered); got != "0\n" {
		t.Errorf("the file system of a frozen checkpoint was recovered: %s", got)
	}
	// As after a power cut the guest would say so.
	a.Must(t, "exec", "copy-1", "--", "sh", "-c", "echo x >/x; sync; echo y >/y; sync")
	var v struct {
		Machine struct {
			PID int `json:"qemu_pid"`
		}
	}
	a.JSON(t, &v, "inspect", "copy-1")
	if err := session.KillAndWait(v.Machine.PID); err != nil {
		t.Fatal(err)
	}
	await(t, func() error {
		if r, err := a.Run("start", "copy-1"); err != nil || r.Code != 0 {
			return fmt.Errorf("start: %v %s", err, r.Stderr)
		}
		return nil
	})
	if got := a.Must(t, "exec", "copy-1", "--", "sh", "-c", recovered); got == "0\n" {
		t.Error("the guest does not say that it has recovered its file system: this test shows nothing")
	}
	a.Must(t, "rm", "copy-1", "--force")
}

// beginInHook begins a checkpoint and returns when the guest is in its hook.
func (a alive) beginInHook(t *testing.T, name string) (ended <-chan session.Result) {
	t.Helper()
	a.Must(t, "exec", "web", "--", "rm", "-f", "/run/in-hook")
	done := make(chan session.Result, 1)
	go func() {
		r, err := a.Run("checkpoint", "create", "web", "--kind", "disk", "--freeze-limit", "1s", "--name", name)
		if err != nil {
			r.Code = -1
		}
		done <- r
	}()
	a.Must(t, "exec", "web", "--", "sh", "-c", "until test -e /run/in-hook; do sleep 0.02; done")
	return done
}

// monitorHangs: the guest freezes, hears no more from anybody, and thaws by its own
// timer long before the monitor is there again.
func (a alive) monitorHangs(t *testing.T) {
	const limit, stands = 1, 5 // seconds
	var v struct {
		Machine struct {
			PID int `json:"monitor_pid"`
		}
	}
	a.JSON(t, &v, "inspect", "web")
	before, _ := a.written(t, 0)
	ended := a.beginInHook(t, "hung")
	if err := syscall.Kill(v.Machine.PID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(stands * time.Second) // how long it hangs is what is tested
	if err := syscall.Kill(v.Machine.PID, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	r := <-ended
	if r.Code != 10 || !strings.Contains(r.Stderr, "thawed themselves, after their limit") {
		t.Errorf("checkpoint create ended with %d: %s%s", r.Code, r.Stdout, r.Stderr)
	}
	if r, err := a.Run("checkpoint", "show", "hung"); err != nil || r.Code != 3 {
		t.Errorf("checkpoint show ended with %d, %v", r.Code, err)
	}
	a.goesOn(t)
	_, wait := a.written(t, before)
	t.Logf("the longest wait for a write was %.2f s", wait)
	if wait < limit*0.9 || wait > stands-2 {
		t.Errorf("the longest wait for a write was %.2f s; the limit was %d s, the monitor hung for %d", wait, limit, stands)
	}
	a.clean(t)
}

// cutInHook cuts a checkpoint off while the guest is in its hook.
func (a alive) cutInHook(t *testing.T, cut func() error) {
	t.Helper()
	before, _ := a.written(t, 0)
	ended := a.beginInHook(t, "cut")
	if err := cut(); err != nil {
		t.Fatal(err)
	}
	if r := <-ended; r.Code == 0 {
		t.Errorf("a checkpoint that was cut off ended with %s%s", r.Stdout, r.Stderr)
	}
	a.goesOn(t)
	if r, err := a.Run("checkpoint", "show", "cut"); err != nil || r.Code != 3 {
		t.Errorf("checkpoint show ended with %d, %v: %s", r.Code, err, r.Stderr)
	}
	if _, wait := a.written(t, before); wait > 3 {
		t.Errorf("the longest wait for a write was %.2f s", wait)
	}
	a.clean(t)
}
