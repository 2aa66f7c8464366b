//go:build linux

package host

import (
	"os"
	"path/filepath"
	"testing"
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
		if state != "ok" && name != "ptrace-scope" {
			t.Errorf("%s is %s", name, state)
		}
	}
	bad := New(Config{Binary: "no-such-qemu", ImgBinary: "no-such-img", KVMDevice: filepath.Join(t.TempDir(), "kvm")})
	got := states(bad)
	for name, want := range map[string]string{"qemu": "failed", "qemu-img": "failed", "device-state": "failed", "kvm": "degraded", "kvm-group": "degraded"} {
		if got[name] != want {
			t.Errorf("%s is %q, want %s", name, got[name], want)
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
