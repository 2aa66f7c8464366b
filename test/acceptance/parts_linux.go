package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The pace of the parts: fast enough that something is under way at every
// instant, slow enough for an emulated guest.
const (
	counterPace = 2 * time.Millisecond
	recordPace  = 10 * time.Millisecond
	passPace    = 5 * time.Millisecond
	tick        = 10 * time.Millisecond
)

// trouble keeps the first thing that went wrong.
type trouble struct {
	mu    sync.Mutex
	first error
}

func (t *trouble) set(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.first == nil {
		t.first = err
	}
}

func (t *trouble) get() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.first
}

// The steps of a counter's second value, which has to fit its first (Knuth's
// MMIX generator).
const (
	lcgFactor = 6364136223846793005
	lcgAdd    = 1442695040888963407
)

// counters has one thread on each CPU.
type counters struct {
	trouble
	mu     sync.Mutex
	counts []uint64
}

func startCounters() (part, error) {
	c := &counters{counts: make([]uint64, runtime.NumCPU())}
	for cpu := range c.counts {
		go c.count(cpu)
	}
	return c, nil
}

// count keeps its values in registers and on its stack, integers and floating
// point, and compares them.
func (c *counters) count(cpu int) {
	runtime.LockOSThread()
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		c.set(fmt.Errorf("pin a thread to CPU %d: %w", cpu, err))
		return
	}
	var n, check, state uint64
	var f float64
	for {
		for range 100 {
			n++
			state = state*lcgFactor + lcgAdd
			f += 0.5
		}
		if check += 100; check != n || f != float64(n)/2 {
			c.set(fmt.Errorf("counter of CPU %d: %d, %d and %g do not fit", cpu, n, check, f))
		}
		if on, err := currentCPU(); err != nil || on != cpu {
			c.set(fmt.Errorf("counter of CPU %d runs on CPU %d: %v", cpu, on, err))
		}
		c.mu.Lock()
		c.counts[cpu] = n
		c.mu.Unlock()
		if n%(1000*100) == 0 && state != jump(n) {
			c.set(fmt.Errorf("counter of CPU %d: state %x does not fit %d", cpu, state, n))
		}
		time.Sleep(counterPace)
	}
}

// jump is the state after n steps.
func jump(n uint64) uint64 {
	factor, add := uint64(1), uint64(0)
	stepFactor, stepAdd := uint64(lcgFactor), uint64(lcgAdd)
	for ; n > 0; n >>= 1 {
		if n&1 == 1 {
			factor *= stepFactor
			add = add*stepFactor + stepAdd
		}
		stepAdd *= stepFactor + 1
		stepFactor *= stepFactor
	}
	return add
}

func currentCPU() (int, error) {
	var cpu uint32
	_, _, errno := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(cpu), nil
}

func (c *counters) report(r *Report) error {
	c.mu.Lock()
	r.Counters = append(r.Counters, c.counts...)
	c.mu.Unlock()
	return c.get()
}

// file is open for good, and written at its offset.
type file struct {
	trouble
	mu   sync.Mutex
	f    *os.File
	path string
	n    uint64
}

const recordBytes = 16

func startFile(path string) (part, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	p := &file{f: f, path: path}
	go p.write()
	return p, nil
}

func (p *file) write() {
	for {
		p.mu.Lock()
		_, err := fmt.Fprintf(p.f, "%015d\n", p.n)
		p.n++
		p.mu.Unlock()
		if err != nil {
			p.set(fmt.Errorf("append record %d: %w", p.n, err))
			return
		}
		time.Sleep(recordPace)
	}
}

func (p *file) report(r *Report) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	r.Records = p.n
	offset, err := p.f.Seek(0, io.SeekCurrent)
	if err != nil || offset != int64(p.n)*recordBytes {
		return fmt.Errorf("the file's offset is %d after %d records: %v", offset, p.n, err)
	}
	content, err := os.ReadFile(p.path)
	if err != nil || len(content) != int(offset) {
		return fmt.Errorf("the file has %d bytes after %d records: %v", len(content), p.n, err)
	}
	for i := range p.n {
		if got := content[i*recordBytes : (i+1)*recordBytes]; !bytes.Equal(got, fmt.Appendf(nil, "%015d\n", i)) {
			return fmt.Errorf("record %d of the file is %q", i, got)
		}
	}
	return p.get()
}

// pipe passes numbers to a child, which passes them back.
type pipe struct {
	trouble
	mu     sync.Mutex
	passed uint64
}

func startPipe() (part, error) {
	cmd := exec.Command("/proc/self/exe", "echo")
	in, err := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err, err2, cmd.Start()); err != nil {
		return nil, err
	}
	p := &pipe{}
	go p.send(in)
	go p.receive(bufio.NewReader(out))
	return p, nil
}

func (p *pipe) send(w io.Writer) {
	for n := uint64(0); ; n++ {
		if _, err := w.Write(binary.LittleEndian.AppendUint64(nil, n)); err != nil {
			p.set(fmt.Errorf("send %d to the other process: %w", n, err))
			return
		}
		time.Sleep(passPace)
	}
}

func (p *pipe) receive(r io.Reader) {
	for n := uint64(0); ; n++ {
		var b [8]byte
		if _, err := io.ReadFull(r, b[:]); err != nil {
			p.set(fmt.Errorf("get %d back from the other process: %w", n, err))
			return
		}
		if got := binary.LittleEndian.Uint64(b[:]); got != n {
			p.set(fmt.Errorf("got %d from the other process, not %d", got, n))
			return
		}
		p.mu.Lock()
		p.passed = n + 1
		p.mu.Unlock()
	}
}

func (p *pipe) report(r *Report) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	r.Passed = p.passed
	return p.get()
}

// echo is the other process: it counts along.
func echo(r io.Reader, w io.Writer) error {
	for n := uint64(0); ; n++ {
		var b [8]byte
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return err
		}
		if got := binary.LittleEndian.Uint64(b[:]); got != n {
			return fmt.Errorf("got %d, not %d", got, n)
		}
		if _, err := w.Write(b[:]); err != nil {
			return err
		}
	}
}

// timer is a timer of the kernel on the clock that does not jump.
type timer struct {
	fd    int
	begin int64
	ticks uint64
}

func monotonic() (int64, error) {
	var ts unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano(), err
}

func startTimer() (part, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	begin, err := monotonic()
	if err != nil {
		return nil, err
	}
	every := unix.NsecToTimespec(tick.Nanoseconds())
	first := unix.NsecToTimespec(begin + tick.Nanoseconds())
	return &timer{fd: fd, begin: begin}, unix.TimerfdSettime(fd, unix.TFD_TIMER_ABSTIME, &unix.ItimerSpec{Interval: every, Value: first}, nil)
}

// report reads the expirations so far, which have to be exactly those between
// the clock before the read and the clock after it.
func (t *timer) report(r *Report) error {
	before, err := monotonic()
	if err != nil {
		return err
	}
	var b [8]byte
	switch _, err := unix.Read(t.fd, b[:]); {
	case err == nil:
		t.ticks += binary.NativeEndian.Uint64(b[:])
	case !errors.Is(err, unix.EAGAIN):
		return err
	}
	after, err := monotonic()
	if err != nil {
		return err
	}
	r.Ticks = t.ticks
	// The interrupt of the last one may still be on its way.
	least, most := uint64(before-t.begin)/uint64(tick), uint64(after-t.begin)/uint64(tick)
	if t.ticks+2 < least || t.ticks > most {
		return fmt.Errorf("the timer has ticked %d times, not %d to %d times", t.ticks, least, most)
	}
	return nil
}
