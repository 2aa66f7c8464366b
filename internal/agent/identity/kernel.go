//go:build linux

package identity

import (
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// SetHostname tells the kernel the machine's name.
func SetHostname(name string) error {
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("set host name %q: %w", name, err)
	}
	return nil
}

// SetClock sets the wall clock, in nanoseconds since the Unix epoch.
func SetClock(unixNano int64) error {
	ts := unix.NsecToTimespec(unixNano)
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		return fmt.Errorf("set the clock to %s: %w", time.Unix(0, unixNano).UTC().Format(time.RFC3339), err)
	}
	return nil
}

// StepClock moves the wall clock by d, to the microsecond. The kernel adds
// (adjtimex(2), ADJ_SETOFFSET): between a read and a set of ours this process
// could be kept waiting, and the clock would lose that time. Its nanoseconds
// (ADJ_NANO) would change how a time daemon of the guest is understood.
func StepClock(d time.Duration) error {
	us := d.Round(time.Microsecond).Microseconds()
	sec, usec := us/1e6, us%1e6
	if usec < 0 {
		sec, usec = sec-1, usec+1e6
	}
	t := unix.Timex{Modes: unix.ADJ_SETOFFSET}
	t.Time.Sec, t.Time.Usec = sec, usec
	if _, err := unix.Adjtimex(&t); err != nil {
		return fmt.Errorf("step the clock by %s: %w", d, err)
	}
	return nil
}

// AddEntropy credits b, which must be secret and fresh, to the kernel's pool
// and reseeds its generators at once, see random(4): what they give from then
// on nobody else's do who was the same machine before.
func AddEntropy(b []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("add entropy: %w", err)
	}
	defer f.Close()
	// struct rand_pool_info: bits, bytes, then the bytes in words.
	info := make([]uint32, 2+(len(b)+3)/4)
	info[0], info[1] = uint32(8*len(b)), uint32(len(b))
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&info[2])), 4*(len(info)-2)), b)
	for _, call := range []struct{ req, arg uintptr }{
		{unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&info[0]))},
		{unix.RNDRESEEDCRNG, 0},
	} {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), call.req, call.arg); errno != 0 {
			return fmt.Errorf("add entropy: %w", errno)
		}
	}
	return nil
}
