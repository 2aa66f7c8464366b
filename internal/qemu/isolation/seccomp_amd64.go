//go:build linux

package isolation

import (
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// denied are system calls that no virtual machine needs. Landlock does not
// govern to whom a named socket connects, nor what is said of a file beside its
// content; others lead to other processes, or to wide parts of the kernel.
func denied() []uint32 {
	return []uint32{
		unix.SYS_CONNECT,
		unix.SYS_CHMOD, unix.SYS_FCHMOD, unix.SYS_FCHMODAT, unix.SYS_FCHMODAT2,
		unix.SYS_CHOWN, unix.SYS_FCHOWN, unix.SYS_LCHOWN, unix.SYS_FCHOWNAT,
		unix.SYS_SETXATTR, unix.SYS_LSETXATTR, unix.SYS_FSETXATTR, unix.SYS_REMOVEXATTR, unix.SYS_LREMOVEXATTR, unix.SYS_FREMOVEXATTR,
		unix.SYS_UTIME, unix.SYS_UTIMES, unix.SYS_FUTIMESAT, unix.SYS_UTIMENSAT,
		unix.SYS_LINK, unix.SYS_LINKAT, unix.SYS_SYMLINK, unix.SYS_SYMLINKAT, unix.SYS_RENAME, unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2,
		unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PIDFD_GETFD, unix.SYS_KCMP,
		unix.SYS_KILL, unix.SYS_TKILL, unix.SYS_RT_SIGQUEUEINFO, unix.SYS_RT_TGSIGQUEUEINFO,
		unix.SYS_UNSHARE, unix.SYS_SETNS, unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT,
		unix.SYS_OPEN_TREE, unix.SYS_MOVE_MOUNT, unix.SYS_FSOPEN, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_OPEN_BY_HANDLE_AT,
		unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL,
	}
}

// rings do what system calls do behind the filter's back; a program that finds
// none goes on without.
func rings() []uint32 {
	return []uint32{unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER}
}

// From the kernel's include/uapi/linux/seccomp.h: where struct seccomp_data
// keeps the call's number, its architecture and (the lower halves of) its
// first two arguments. x32 is the bit of the second ABI of this architecture.
const (
	atCall, atArch, atFirst, atSecond = 0, 4, 16, 24

	x32      = 0x40000000
	sockType = 0xf
)

// program is a filter in the making.
type program []unix.SockFilter

func (p *program) load(at uint32) {
	*p = append(*p, unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at})
}

func (p *program) give(action uint32) {
	*p = append(*p, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action})
}

// jump goes on as many steps later as the test's outcome says.
func (p *program) jump(test uint16, with uint32, then, otherwise uint8) {
	*p = append(*p, unix.SockFilter{Code: unix.BPF_JMP | test | unix.BPF_K, K: with, Jt: then, Jf: otherwise})
}

// refuse answers the call with the error.
func (p *program) refuse(calls []uint32, errno unix.Errno) {
	for _, nr := range slices.Sorted(slices.Values(calls)) {
		p.jump(unix.BPF_JEQ, nr, 0, 1)
		p.give(unix.SECCOMP_RET_ERRNO | uint32(errno))
	}
}

// filter is the whole program. Of sockets only connections between processes by
// name or in pairs can be made; with connect denied that leaves to listen. A datagram
// socket could send to any name.
func filter() program {
	const deny = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	var p program
	p.load(atArch)
	p.jump(unix.BPF_JEQ, unix.AUDIT_ARCH_X86_64, 1, 0)
	p.give(deny)
	p.load(atCall)
	p.jump(unix.BPF_JGE, x32, 0, 1)
	p.give(deny)
	p.refuse(denied(), unix.EPERM)
	p.refuse(rings(), unix.ENOSYS)
	p.jump(unix.BPF_JEQ, unix.SYS_SOCKET, 2, 0)
	p.jump(unix.BPF_JEQ, unix.SYS_SOCKETPAIR, 1, 0)
	p.give(unix.SECCOMP_RET_ALLOW)
	p.load(atFirst)
	p.jump(unix.BPF_JEQ, unix.AF_UNIX, 0, 3)
	p.load(atSecond)
	p = append(p, unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: sockType})
	p.jump(unix.BPF_JEQ, unix.SOCK_STREAM, 1, 0)
	p.give(deny)
	p.give(unix.SECCOMP_RET_ALLOW)
	return p
}

// filterCalls filters those of the thread.
func filterCalls() error {
	p := filter()
	prog := unix.SockFprog{Len: uint16(len(p)), Filter: &p[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return fmt.Errorf("this kernel refuses a filter (%w)", errno)
	}
	return nil
}
