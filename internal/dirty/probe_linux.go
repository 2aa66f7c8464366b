package dirty

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Probe tries each strategy on a few pages of this process, best first. What
// only the target can tell, such as whether it may be traced, Attach finds.
func Probe() []Support {
	return []Support{
		support(Userfaultfd, probeUserfault),
		support(SoftDirty, probeSoftDirty),
		{Strategy: Untracked, Available: true},
	}
}

func support(s Strategy, probe func(p *process, memory []byte) error) Support {
	err := onOwnPages(probe)
	if err != nil {
		return Support{Strategy: s, Reason: err.Error()}
	}
	return Support{Strategy: s, Available: true}
}

// probePages is how many pages of our own a probe plays with.
const probePages = 4

// onOwnPages calls probe with this process as the target and some fresh pages
// as its memory.
func onOwnPages(probe func(p *process, memory []byte) error) error {
	memory, err := unix.Mmap(-1, 0, probePages*PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("map pages: %w", err)
	}
	defer unix.Munmap(memory)
	start := uint64(uintptr(unsafe.Pointer(&memory[0])))
	p := &process{
		pid: os.Getpid(), pidfd: -1, size: int64(len(memory)),
		segments: []segment{{start: start, end: start + uint64(len(memory))}},
	}
	defer p.close()
	if p.proc, err = os.OpenFile("/proc/self", unix.O_PATH|unix.O_DIRECTORY, 0); err != nil {
		return err
	}
	if p.pagemap, err = p.open("pagemap", os.O_RDONLY); err != nil {
		return err
	}
	return probe(p, memory)
}

func probeUserfault(p *process, memory []byte) error {
	if runtime.GOARCH != "amd64" {
		return fmt.Errorf("made for amd64 hosts, not %s", runtime.GOARCH)
	}
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK|userfaultUserModeOnly, 0, 0)
	if errno != 0 {
		return fmt.Errorf("userfaultfd: %w; the kernel needs CONFIG_USERFAULTFD", errno)
	}
	u := &userfault{p: p, fd: int(fd)}
	defer u.close()
	if err := userfaultSetup(u.fd); err != nil {
		return fmt.Errorf("%w; the kernel has to be Linux 6.7 or later", err)
	}
	err := u.register()
	if err == nil {
		err = u.arm(func(first, count int64) {})
	}
	if err != nil {
		return fmt.Errorf("%w; the kernel has to be Linux 6.7 or later", err)
	}
	return probeWrites(u, memory)
}

func probeSoftDirty(p *process, memory []byte) error {
	d := softDirty{p}
	if err := d.clear(); err != nil {
		return fmt.Errorf("%w; the kernel needs CONFIG_MEM_SOFT_DIRTY", err)
	}
	return probeWrites(d, memory)
}

// probeWrites writes to one page and reads another, and checks the report.
// A kernel that lacks soft-dirty bits reports none.
func probeWrites(m method, memory []byte) error {
	memory[2*PageSize] = memory[0] + 1
	got := NewSet(int64(len(memory)))
	if err := m.scan(got.Add); err != nil {
		return err
	}
	if !got.Has(2) || got.Has(1) {
		return errors.New("the kernel does not report which pages were written")
	}
	return nil
}

// capSysPtrace is the number of CAP_SYS_PTRACE.
const capSysPtrace = 19

// CheckPolicy is UNSUPPORTED when the host's policy (Yama's ptrace_scope)
// keeps this process from looking into any other.
func CheckPolicy() error {
	b, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope")
	if err != nil {
		return nil // no Yama
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return fmt.Errorf("read own capabilities: %w", err)
	}
	return checkScope(strings.TrimSpace(string(b)), string(status))
}

// checkScope judges a ptrace_scope for a process with that /proc/PID/status.
func checkScope(scope, status string) error {
	var capabilities uint64
	for line := range strings.Lines(status) {
		if hex, ok := strings.CutPrefix(line, "CapEff:"); ok {
			capabilities, _ = strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
		}
	}
	if scope == "0" || scope == "1" || (scope == "2" && capabilities&(1<<capSysPtrace) != 0) {
		return nil
	}
	return errdefs.New(errdefs.Unsupported,
		"full checkpoints: kernel.yama.ptrace_scope is %s, which forbids looking into QEMU; set it to 1 with sysctl", scope)
}
