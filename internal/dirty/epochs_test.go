//go:build linux

package dirty

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// storm writes to the memory for ever, past what any epoch ends with: a few
// pages at a time many times over, then others, by stores and by reads of the
// file into pages. The first word counts the writes.
func storm(mem []byte, file int) {
	const (
		window = 48   // pages that are written to at a time
		stay   = 4096 // writes after which the window moves on
		burst  = 64   // writes between two rests, so that an epoch leaves pages alone
	)
	pages := uint64(len(mem)/PageSize) - 1
	x := uint64(88172645463325252)
	for n := uint64(1); ; n++ {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		page := mem[(1+(n/stay*window*5/4+x%window)%pages)*PageSize:][:PageSize]
		if n%256 == 0 {
			_, err := unix.Pread(file, page, 0)
			must(nil, err)
		}
		binary.LittleEndian.PutUint64(page[x>>40%(PageSize/8)*8:], x)
		if n%burst == 0 {
			binary.LittleEndian.PutUint64(mem, n)
			time.Sleep(100 * time.Microsecond) // its pace
		}
	}
}

// halt stops all threads of the target until goOn.
func (c *target) halt() {
	c.t.Helper()
	must(c.t, unix.Kill(c.cfg.PID, unix.SIGSTOP))
	deadline := time.Now().Add(10 * time.Second)
	for !c.halted() {
		if time.Now().After(deadline) {
			c.t.Fatalf("process %d does not stop", c.cfg.PID)
		}
		time.Sleep(time.Millisecond) // there is no event for the last thread
	}
}

func (c *target) halted() bool {
	c.t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", c.cfg.PID))
	must(c.t, err)
	for _, path := range tasks {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // a thread that has ended
		}
		// The state follows the name, in parentheses.
		if i := bytes.LastIndexByte(text, ')'); text[i+2] != 'T' {
			return false
		}
	}
	return len(tasks) > 0
}

func (c *target) goOn() {
	c.t.Helper()
	must(c.t, unix.Kill(c.cfg.PID, unix.SIGCONT))
}

// awaitWrites waits until the storm has written n times more, and returns how
// often it has.
func awaitWrites(t *testing.T, tr *Tracker, since, n uint64) uint64 {
	t.Helper()
	word := make([]byte, 8)
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		_, err := tr.ReadAt(word, 0)
		must(t, err)
		if got := binary.LittleEndian.Uint64(word); got >= since+n {
			return got
		}
		if time.Now().After(deadline) {
			t.Fatal("the target does not write")
		}
	}
}

// TestEpochsAddUpToTheMemory: a copy to which each epoch's pages are brought
// over is the memory, byte for byte, whenever the process stands still; and so
// is one that is made of all its own pages at once, which needs no tracking. The
// process is stopped anywhere between two writes, by each strategy that the
// kernel has.
func TestEpochsAddUpToTheMemory(t *testing.T) {
	const pages, epochs = 1000, 25
	each(t, pages, func(t *testing.T, c *target, tr *Tracker) {
		tracked := newShadow(t, c.cfg)
		bring := func(s shadow, find func() (*Set, error)) int64 {
			set, err := find()
			must(t, err)
			s.copy(t, tr, set)
			return int64(set.Len())
		}
		c.do("storm")
		defer c.goOn() // or it would not end
		writes := awaitWrites(t, tr, 0, 1000)
		c.halt()
		bring(tracked, tr.Arm)
		tracked.compare(t, "armed", tr)
		var reported, most int64
		for epoch := range epochs {
			c.goOn()
			writes = awaitWrites(t, tr, writes, 1500)
			var n int64
			if tr.Strategy().Live() { // an epoch may end while the process runs
				n = bring(tracked, tr.Scan)
				writes = awaitWrites(t, tr, writes, 500)
			}
			c.halt()
			n += bring(tracked, tr.Scan)
			reported, most = reported+n, max(most, n)
			tracked.compare(t, fmt.Sprintf("epoch %d", epoch), tr)
			if n := bring(tracked, tr.Scan); n != 0 && tr.Strategy() != Untracked {
				t.Errorf("epoch %d: a process that stands still wrote %d pages", epoch, n)
			}
			if epoch%5 == 4 {
				whole := newShadow(t, c.cfg)
				bring(whole, tr.Arm)
				whole.compare(t, fmt.Sprintf("epoch %d, all its own pages", epoch), tr)
			}
		}
		t.Logf("%d writes, %d pages reported in %d epochs, %d at most in one", writes, reported, epochs, most)
		if reported == 0 || tr.Strategy() != Untracked && reported > epochs*pages/2 {
			t.Errorf("%d pages were reported in %d epochs: that says nothing", reported, epochs)
		}
	})
}
