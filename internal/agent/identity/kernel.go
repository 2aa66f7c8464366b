//go:build linux

package identity

import (
	"fmt"
	"os"
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
