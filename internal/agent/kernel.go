//go:build linux

package agent

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
)

func owner(fi fs.FileInfo) uint32 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Uid
	}
	return 0
}

// configureKernel tells the kernel name and time, feeds its pool, and mounts
// the memory file systems.
func configureKernel(m *agentv1.ConfigureRequest) error {
	if name := m.GetHostname(); name != "" {
		if err := unix.Sethostname([]byte(name)); err != nil {
			return fmt.Errorf("set host name %q: %w", name, err)
		}
	}
	if n := m.GetUnixNano(); n != 0 {
		ts := unix.NsecToTimespec(n)
		if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
			return fmt.Errorf("set the clock to %s: %w", time.Unix(0, n).UTC().Format(time.RFC3339), err)
		}
	}
	if len(m.GetEntropy()) > 0 {
		if err := addEntropy(m.GetEntropy()); err != nil {
			return err
		}
	}
	for _, p := range m.GetTmpfs() {
		if err := mountTmpfs(p); err != nil {
			return err
		}
	}
	return nil
}

// addEntropy credits what the host gave and reseeds at once, see random(4).
func addEntropy(b []byte) error {
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

// mountTmpfs mounts a memory file system with the mode and owner of the folder
// it covers.
func mountTmpfs(p string) error {
	if err := os.MkdirAll(p, 0o755); err != nil {
		return fmt.Errorf("mount tmpfs %q: %w", p, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil {
		return fmt.Errorf("mount tmpfs %q: %w", p, err)
	}
	opts := fmt.Sprintf("mode=%o,uid=%d,gid=%d", st.Mode&0o7777, st.Uid, st.Gid)
	if err := unix.Mount("tmpfs", p, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, opts); err != nil {
		return fmt.Errorf("mount tmpfs %q: %w", p, err)
	}
	return nil
}
