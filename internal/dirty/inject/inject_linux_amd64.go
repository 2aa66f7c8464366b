package inject

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// From the kernel's include/uapi/linux/ptrace.h.
const (
	ptraceGetSigmask = 0x420a
	ptraceSetSigmask = 0x420b
	ptraceEventStop  = 128
)

// userCode64 is the code segment of 64-bit programs.
const userCode64 = 0x33

// Session is one stop of a process's main thread in which it makes system
// calls for us. It is valid only inside the function that Do calls, on its
// goroutine.
type Session struct {
	pid int
	// mem is /proc/PID/mem.
	mem *os.File
	// saved and mask are what the thread had, and gets back.
	saved unix.PtraceRegs
	mask  uint64
	// entry is the address of a syscall instruction.
	entry uint64
}

// Do stops the main thread of process pid, lets do make system calls in it,
// and lets it go on as if nothing had been. ctx bounds the wait for the stop;
// once the thread has been changed it is always changed back. The error wraps
// EPERM when the process must not be traced, WRONG_STATE when it has ended or
// is stopped by a signal.
func Do(ctx context.Context, pid int, do func(*Session) error) error {
	result := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with this goroutine, and the kernel
		// lets go of what it may still trace.
		runtime.LockOSThread()
		result <- stopAndDo(ctx, pid, do)
	}()
	return <-result
}

func stopAndDo(ctx context.Context, pid int, do func(*Session) error) (err error) {
	s := &Session{pid: pid}
	stops := make(chan os.Signal, 1)
	signal.Notify(stops, unix.SIGCHLD)
	defer signal.Stop(stops)
	if err := unix.PtraceSeize(pid); err != nil {
		return fmt.Errorf("ptrace: %w", ended(err))
	}
	// Fails only if the thread has ended or did not stop in time.
	defer func() { _ = unix.PtraceDetach(pid) }()
	if s.mem, err = os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0); err != nil {
		return err
	}
	defer s.mem.Close()
	if err := unix.PtraceInterrupt(pid); err != nil {
		return fmt.Errorf("ptrace interrupt: %w", ended(err))
	}
	if err := s.awaitStop(ctx, stops); err != nil {
		return err
	}
	if err := s.save(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.restore()) }()
	if err := s.guard(); err != nil {
		return err
	}
	return do(s)
}

// awaitStop waits until the thread stands where we asked it to. Signals that
// come before are handed on.
func (s *Session) awaitStop(ctx context.Context, stops <-chan os.Signal) error {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(s.pid, &status, unix.WALL|unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("await ptrace stop: %w", err)
		case pid == 0:
			select {
			case <-stops:
			case <-ctx.Done():
				return fmt.Errorf("await ptrace stop: %w", ctx.Err())
			}
		case !status.Stopped():
			return ended(unix.ESRCH)
		case status>>16 != ptraceEventStop:
			if err := unix.PtraceCont(s.pid, int(status.StopSignal())); err != nil {
				return fmt.Errorf("hand on signal: %w", err)
			}
		case status.StopSignal() != unix.SIGTRAP:
			return errdefs.New(errdefs.WrongState, "process %d is stopped by %v; continue it first", s.pid, status.StopSignal())
		default:
			return nil
		}
	}
}

// save keeps what will be changed and finds a syscall instruction.
func (s *Session) save() error {
	if err := unix.PtraceGetRegs(s.pid, &s.saved); err != nil {
		return fmt.Errorf("read registers: %w", err)
	}
	if s.saved.Cs != userCode64 {
		return errdefs.New(errdefs.Unsupported, "process %d is no 64-bit program", s.pid)
	}
	if err := s.sigmask(ptraceGetSigmask, &s.mask); err != nil {
		return err
	}
	var before [2]byte
	if _, err := s.mem.ReadAt(before[:], int64(s.saved.Rip)-2); err == nil && string(before[:]) == syscallCode {
		s.entry = s.saved.Rip - 2
		return nil
	}
	return s.findInVDSO()
}

// syscallCode is the instruction.
const syscallCode = "\x0f\x05"

// auxVDSO is AT_SYSINFO_EHDR, the entry of /proc/PID/auxv that says where the
// vdso is.
const auxVDSO = 33

// findInVDSO finds the instruction in the code that the kernel maps into each
// process.
func (s *Session) findInVDSO() error {
	aux, err := os.ReadFile(fmt.Sprintf("/proc/%d/auxv", s.pid))
	if err != nil {
		return err
	}
	page := make([]byte, os.Getpagesize())
	for ; len(aux) >= 16; aux = aux[16:] {
		if binary.NativeEndian.Uint64(aux) != auxVDSO {
			continue
		}
		// It is some pages long; the first that cannot be read is behind it.
		for at := binary.NativeEndian.Uint64(aux[8:]); ; at += uint64(len(page)) {
			if _, err := s.mem.ReadAt(page, int64(at)); err != nil {
				break
			}
			if i := bytes.Index(page, []byte(syscallCode)); i >= 0 {
				s.entry = at + uint64(i)
				return nil
			}
		}
	}
	return errdefs.New(errdefs.Unsupported, "process %d has no syscall instruction in its vdso", s.pid)
}

// guard holds signals back and lets the process end with us.
func (s *Session) guard() error {
	// A trap that is held back would reset the process's handler for it.
	all := ^uint64(0) &^ (1 << (unix.SIGTRAP - 1))
	if err := s.sigmask(ptraceSetSigmask, &all); err != nil {
		return err
	}
	if err := unix.PtraceSetOptions(s.pid, unix.PTRACE_O_EXITKILL); err != nil {
		return fmt.Errorf("set ptrace options: %w", err)
	}
	return nil
}

// restore gives the thread back what it had.
func (s *Session) restore() error {
	if err := unix.PtraceSetRegs(s.pid, &s.saved); err != nil {
		return fmt.Errorf("put registers back: %w", ended(err))
	}
	if err := s.sigmask(ptraceSetSigmask, &s.mask); err != nil {
		return err
	}
	if err := unix.PtraceSetOptions(s.pid, 0); err != nil {
		return fmt.Errorf("reset ptrace options: %w", ended(err))
	}
	return nil
}

func (s *Session) sigmask(request uintptr, mask *uint64) error {
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, request, uintptr(s.pid),
		unsafe.Sizeof(*mask), uintptr(unsafe.Pointer(mask)), 0, 0)
	if errno != 0 {
		return fmt.Errorf("ptrace signal mask: %w", ended(errno))
	}
	return nil
}

// Call lets the thread make one system call and returns its result; the error
// of a call that failed wraps its errno.
func (s *Session) Call(number uint64, args ...uint64) (int, error) {
	regs := s.saved
	regs.Rip, regs.Rax, regs.Orig_rax = s.entry, number, ^uint64(0)
	for i, r := range []*uint64{&regs.Rdi, &regs.Rsi, &regs.Rdx, &regs.R10, &regs.R8, &regs.R9} {
		if i < len(args) {
			*r = args[i]
		}
	}
	if err := unix.PtraceSetRegs(s.pid, &regs); err != nil {
		return -1, fmt.Errorf("set registers: %w", ended(err))
	}
	if err := unix.PtraceSingleStep(s.pid); err != nil {
		return -1, fmt.Errorf("single-step: %w", ended(err))
	}
	// No deadline: a thread in the middle of a system call cannot be let go.
	var status unix.WaitStatus
	for {
		_, err := unix.Wait4(s.pid, &status, unix.WALL, nil)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			return -1, fmt.Errorf("await system call: %w", err)
		}
	}
	if !status.Stopped() {
		return -1, ended(unix.ESRCH)
	}
	if err := unix.PtraceGetRegs(s.pid, &regs); err != nil {
		return -1, fmt.Errorf("read registers: %w", ended(err))
	}
	if status.StopSignal() != unix.SIGTRAP || status>>16 != 0 || regs.Rip != s.entry+2 {
		return -1, fmt.Errorf("system call %d in process %d was interrupted (status %#x)", number, s.pid, uint32(status))
	}
	if n := int64(regs.Rax); n < 0 && n > -4096 {
		return -1, fmt.Errorf("system call %d in process %d: %w", number, s.pid, unix.Errno(-n))
	}
	return int(regs.Rax), nil
}

// WithString calls do with the address of text, ended by a zero byte, in the thread's memory,
// below its stack's red zone, and puts back what was there.
func (s *Session) WithString(text string, do func(address uint64) error) (err error) {
	// 128 bytes of red zone, then room for the text, aligned.
	address := (s.saved.Rsp - 128 - uint64(len(text)) - 1) &^ 15
	old := make([]byte, len(text)+1)
	if _, err := s.mem.ReadAt(old, int64(address)); err != nil {
		return fmt.Errorf("read stack: %w", err)
	}
	if _, err := s.mem.WriteAt(append([]byte(text), 0), int64(address)); err != nil {
		return fmt.Errorf("write stack: %w", err)
	}
	defer func() {
		if _, werr := s.mem.WriteAt(old, int64(address)); werr != nil {
			err = errors.Join(err, fmt.Errorf("put stack back: %w", werr))
		}
	}()
	return do(address)
}

// ended gives the error of a process that is not there any more its kind.
func ended(err error) error {
	if errors.Is(err, unix.ESRCH) {
		return errdefs.New(errdefs.WrongState, "%w; the process has ended", err)
	}
	return err
}
