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
	for _, bad := range []machine.Spec{{Network: "bridge"}, {Allow: []string{"a"}}, {Network: "internet", Allow: []string{"10.0.0.1"}}} {
		if err := bad.Complete(); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}
