package machine_test

import (
	"encoding/json"
	"testing"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// TestNetworkOfSpec: what is no network is refused, a machine of before has none, and the
// lists are a part of the spec's JSON, which checkpoints keep.
func TestNetworkOfSpec(t *testing.T) {
	var old machine.Spec
	if err := json.Unmarshal([]byte(`{"memory_bytes":536870912,"cpus":2,"disk_bytes":0,"network":"none"}`), &old); err != nil || old.Policy() != nil {
		t.Errorf("%+v, %v", old.Policy(), err)
	}
	for stored, want := range map[string]bool{`{}`: false, `{"network":"open"}`: true} {
		var s machine.Spec
		if err := json.Unmarshal([]byte(stored), &s); err != nil || (s.Policy() != nil) != want {
			t.Errorf("%s: %+v, %v", stored, s.Policy(), err)
		}
	}
	var fresh machine.Spec
	if err := fresh.Complete(); err != nil || fresh.Network != "internet" {
		t.Errorf("a new machine: %q, %v", fresh.Network, err)
	}
	s := machine.Spec{Network: "internet", Allow: []string{"a.example:443"}, AllowHost: []int{80}}
	if err := s.Complete(); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(s)
	var again machine.Spec
	if err == nil {
		err = json.Unmarshal(b, &again)
	}
	if p := again.Policy(); err != nil || p == nil || p.Mode != "internet" || p.Allow[0] != "a.example:443" || p.AllowHost[0] != 80 {
		t.Errorf("%s: %+v, %v", b, p, err)
	}
	for _, bad := range []machine.Spec{{Network: "bridge"}, {Network: "none", Allow: []string{"a"}}, {Network: "internet", Allow: []string{"10.0.0.1"}}} {
		if err := bad.Complete(); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}
