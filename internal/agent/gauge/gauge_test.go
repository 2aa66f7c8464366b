//go:build linux

package gauge

import "testing"

const meminfo = "MemTotal:         486024 kB\nMemFree:          300000 kB\nMemAvailable:     402312 kB\n"

const dev = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:   99999      10    0    0    0     0          0         0    99999      10    0    0    0     0       0          0
  eth0: 1200       10    0    0    0     0          0         0    340       10    0    0    0     0       0          0
  eth1:5 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0
`

func TestParse(t *testing.T) {
	if got := field([]byte(meminfo), "MemAvailable:"); got != 402312 {
		t.Errorf("available %d", got)
	}
	if got := field([]byte(meminfo), "SwapTotal:"); got != 0 {
		t.Errorf("what is not there is %d", got)
	}
	if r, s := traffic([]byte(dev)); r != 1205 || s != 347 {
		t.Errorf("received %d, sent %d", r, s)
	}
	if r, s := traffic([]byte("eth0: x\nbroken")); r != 0 || s != 0 {
		t.Errorf("of nonsense: %d, %d", r, s)
	}
}

func TestRead(t *testing.T) {
	u, err := Read()
	if err != nil || u.GetMemoryBytes() == 0 || u.GetMemoryAvailableBytes() > u.GetMemoryBytes() {
		t.Errorf("%v, %v", u, err)
	}
}
