package catalog_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
)

func TestEffects(t *testing.T) {
	c := open(t)
	c.image("build1", "debian")
	m := c.machine("m1", "web").ID
	begun := time.Unix(1000, 0)
	for i := range 1005 {
		err := c.RecordEffect(t.Context(), catalog.Effect{MachineID: m, Kind: catalog.CopiedOut, What: fmt.Sprint("/", i), At: begun.Add(time.Duration(i) * time.Second)})
		if err != nil {
			t.Fatal(err)
		}
	}
	all, err := c.EffectsSince(t.Context(), m, time.Time{})
	if err != nil || len(all) != 1000 || all[0].What != "/5" {
		t.Errorf("kept %d effects from %v on, %v", len(all), all[0], err)
	}
	late, err := c.EffectsSince(t.Context(), m, begun.Add(1003*time.Second))
	if err != nil || len(late) != 2 || late[0].What != "/1003" || late[1].Kind != catalog.CopiedOut {
		t.Errorf("since then: %v, %v", late, err)
	}
	if others, err := c.EffectsSince(t.Context(), "other", time.Time{}); err != nil || len(others) != 0 {
		t.Errorf("another machine has %v, %v", others, err)
	}
}
