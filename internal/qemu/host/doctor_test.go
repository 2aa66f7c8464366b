//go:build linux

package host

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/dirty"
)

func TestChecks(t *testing.T) {
	states := func(h *Host) map[string]string {
		got := map[string]string{}
		for _, c := range h.Checks(ctxOf(t), "") {
			if (c.State == "ok") != (c.Fix == "") || c.Detail == "" {
				t.Errorf("%+v: a fix belongs to what is not ok", c)
			}
			got[c.Name] = c.State
		}
		return got
	}
	good := newHost(t)
	good.cfg.KVMDevice = "/dev/null"
	for name, state := range states(good) {
		if state != "ok" && name != "ptrace-scope" && name != "memory-tracking" {
			t.Errorf("%s is %s", name, state)
		}
	}
	bad := New(Config{Binary: "no-such-qemu", ImgBinary: "no-such-img", KVMDevice: filepath.Join(t.TempDir(), "kvm")})
	got := states(bad)
	for name, want := range map[string]string{"qemu": "failed", "qemu-img": "failed", "device-state": "failed", "kvm": "degraded"} {
		if got[name] != want {
			t.Errorf("%s is %q, want %s", name, got[name], want)
		}
	}
}

// The fix for a device that may not be opened is one that can work: it names a
// group only where that may open the device.
func TestAccessFix(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("giving files away needs root")
	}
	device := filepath.Join(t.TempDir(), "kvm")
	must(t, os.WriteFile(device, nil, 0o600))
	const give = "chgrp kvm"
	for _, test := range []struct {
		gid   int
		mode  os.FileMode
		gives bool
	}{
		{0, 0o600, true},
		{0, 0o660, true},
		{54321, 0o660, true}, // a group without a name
		{1, 0o600, true},     // daemon, on every distribution
		{1, 0o660, false},
	} {
		must(t, os.Chown(device, 0, test.gid))
		must(t, os.Chmod(device, test.mode))
		fix := accessFix(device)
		if strings.Contains(fix, give) != test.gives || !test.gives && !strings.Contains(fix, "daemon") {
			t.Errorf("group %d, mode %o: %s", test.gid, test.mode, fix)
		}
	}
}

func TestPtraceScope(t *testing.T) {
	path := filepath.Join(t.TempDir(), "scope")
	if c := checkPtrace(path); c.State != "ok" {
		t.Errorf("no Yama: %+v", c)
	}
	for scope, want := range map[string]string{"0\n": "ok", "1\n": "ok", "3\n": "degraded"} {
		must(t, os.WriteFile(path, []byte(scope), 0o600))
		if c := checkPtrace(path); c.State != want {
			t.Errorf("scope %q: %+v", scope, c)
		}
	}
}

func TestTrackingCheck(t *testing.T) {
	lacks := func(s dirty.Strategy) dirty.Support { return dirty.Support{Strategy: s, Reason: "no " + string(s)} }
	has := func(s dirty.Strategy) dirty.Support { return dirty.Support{Strategy: s, Available: true} }
	for _, c := range []struct {
		support []dirty.Support
		state   string
		says    []string
	}{
		{[]dirty.Support{has(dirty.Userfaultfd), lacks(dirty.SoftDirty), has(dirty.Untracked)}, "ok", []string{"userfaultfd"}},
		{[]dirty.Support{lacks(dirty.Userfaultfd), has(dirty.SoftDirty), has(dirty.Untracked)}, "degraded", []string{"soft-dirty", "no userfaultfd"}},
		{[]dirty.Support{lacks(dirty.Userfaultfd), lacks(dirty.SoftDirty), has(dirty.Untracked)}, "degraded", []string{"untracked", "no userfaultfd; no soft-dirty"}},
	} {
		got := checkTracking(c.support)
		if got.State != c.state || (got.State == "ok") != (got.Fix == "") {
			t.Errorf("%+v", got)
		}
		for _, text := range c.says {
			if !strings.Contains(got.Detail, text) {
				t.Errorf("%q does not say %q", got.Detail, text)
			}
		}
	}
}
