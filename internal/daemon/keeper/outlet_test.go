//go:build linux

package keeper

import (
	"testing"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// TestOutlet: a run that is nobody's and stays so, such as that of a checkpoint that is only
// proven, has no effect outside.
func TestOutlet(t *testing.T) {
	with, without := machine.Spec{Network: "internet"}, machine.Spec{Network: "none"}
	for _, tt := range []struct {
		l    launch
		want bool
	}{
		{launch{machine: catalog.Machine{ID: "m", Spec: with}}, true},
		{launch{machine: catalog.Machine{ID: "m", Spec: without}}, false},
		{launch{machine: catalog.Machine{Spec: with}, wait: true}, true},
		{launch{machine: catalog.Machine{Spec: with}}, false},
	} {
		if got := outlet(tt.l); (got != nil) != tt.want {
			t.Errorf("%+v: %v", tt.l, got)
		}
	}
}
