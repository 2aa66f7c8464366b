//go:build linux

package identity

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestStepTime(t *testing.T) {
	for d, want := range map[time.Duration]unix.Timeval{
		0:                        {},
		1500 * time.Millisecond:  {Sec: 1, Usec: 500000},
		-time.Microsecond:        {Sec: -1, Usec: 999999},
		-time.Second:             {Sec: -1},
		-1500 * time.Millisecond: {Sec: -2, Usec: 500000},
		-400:                     {},
		-600:                     {Sec: -1, Usec: 999999},
	} {
		if got := stepTime(d); got != want {
			t.Errorf("%s: %+v, want %+v", d, got, want)
		}
	}
}
