//go:build linux

package revive

import (
	"slices"
	"testing"
	"time"
)

func TestPause(t *testing.T) {
	var got []time.Duration
	for _, starts := range []int{0, 1, 2, 3, 9, 10, 11, 1000} {
		got = append(got, pause(starts))
	}
	want := []time.Duration{0, time.Second, 2 * time.Second, 4 * time.Second, 256 * time.Second, lastWait, lastWait, lastWait}
	if !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}
