//go:build linux

// Package isolation starts a program such that it reaches nothing of the host
// but the files that it is given: by Landlock, a filter of system calls, and
// namespaces of its own, as far as the host has them. It knows nothing of QEMU.
package isolation

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/machine"
)

// Spec is what a program may reach. All paths are absolute; a file is itself,
// whatever name it is opened by, a folder all that is opened by a name below it.
type Spec struct {
	// Read may be read. What is not there is left out.
	Read []string
	// Execute may be read and executed. What is not there is left out.
	Execute []string
	// Write may be read and written, and be a device; it has to be there.
	Write []string
	// Folders are the program's own: it makes and removes files in them.
	Folders []string
	Without Without
}

// Part is a part of the isolation.
type Part string

// The parts.
const (
	Files      Part = "files"
	Calls      Part = "system calls"
	Namespaces Part = "namespaces"
)

// Without are parts that are left out, with the reason.
type Without map[Part]string

// maxFiles is how many descriptors the program may have open.
const maxFiles = 4096

// Start starts what command makes, a new one at each call, and says what it is
// isolated by. It may be asked for a second one, where the host refuses
// namespaces. A part that the host has not got is Missing and no error.
//
// Landlock and the filter are for the calling thread and what it starts, which
// saves a program of ours that sets them up for itself and becomes the other
// one, which takes longer to start than all of this.
func (s Spec) Start(command func() *exec.Cmd) (*os.Process, machine.Isolation, error) {
	var cmd *exec.Cmd
	var state machine.Isolation
	var err error
	onceOnThread(func() { cmd, err = s.start(command, &state) })
	if err != nil {
		return nil, machine.Isolation{}, err
	}
	if err := limit(cmd.Process); err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		return nil, machine.Isolation{}, err
	}
	return cmd.Process, state, nil
}

// onceOnThread runs f on a thread that ends then: never unlocked, it is one
// that Go neither uses again nor starts another one from. The main thread
// would not end.
func onceOnThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		onceOnThread(f)
		runtime.UnlockOSThread()
	}()
	<-done
}

func (s Spec) start(command func() *exec.Cmd, state *machine.Isolation) (*exec.Cmd, error) {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("give up new privileges: %w", err)
	}
	report := func(part Part, with string, err error) {
		if err == nil {
			state.By = append(state.By, fmt.Sprintf("%s (%s)", part, with))
		} else {
			state.Missing = append(state.Missing, fmt.Sprintf("%s: %v", part, err))
		}
	}
	cmd, spaces, err := s.prepare(command, report)
	if err != nil {
		return nil, err
	}
	if spaces != nil {
		report(Namespaces, spacesText, spaces)
		return cmd, cmd.Start()
	}
	err = cmd.Start()
	if refused(err) {
		report(Namespaces, spacesText, fmt.Errorf("this host refuses them (%w)", errors.Unwrap(err)))
		cmd = command()
		return cmd, cmd.Start()
	}
	report(Namespaces, spacesText, nil)
	return cmd, err
}

// spacesText names the namespaces of own.
const (
	own        = unix.CLONE_NEWUSER | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWIPC
	spacesText = "user, network, processes, IPC"
)

// prepare restricts the thread; spaces is why there are no namespaces.
func (s Spec) prepare(command func() *exec.Cmd, report func(part Part, with string, err error)) (cmd *exec.Cmd, spaces, err error) {
	cmd = command()
	abi, files := 0, s.left(Files)
	if files == nil {
		if abi, files = s.restrictFiles(); errors.Is(files, errSpec) {
			return nil, nil, files
		}
	}
	report(Files, fmt.Sprintf("Landlock ABI %d", abi), files)
	calls := s.left(Calls)
	if calls == nil {
		calls = filterCalls()
	}
	report(Calls, "seccomp", calls)
	if spaces = s.left(Namespaces); spaces == nil {
		if cmd.SysProcAttr == nil {
			cmd.SysProcAttr = &syscall.SysProcAttr{}
		}
		// No ids are mapped: the program is nobody in there, to whom no
		// capability comes, and its user's files stay its own.
		cmd.SysProcAttr.Cloneflags |= own
	}
	return cmd, spaces, nil
}

// left is why a part is left out; nil if it is not.
func (s Spec) left(part Part) error {
	if why, out := s.Without[part]; out {
		return errors.New(why)
	}
	return nil
}

// refused reports whether a start failed for want of namespaces.
func refused(err error) bool {
	for _, e := range []error{unix.EPERM, unix.EACCES, unix.ENOSPC, unix.EUSERS, unix.EINVAL, unix.ENOSYS} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// limit keeps the program's memory out of core dumps and bounds its descriptors.
func limit(p *os.Process) error {
	for what, most := range map[int]uint64{unix.RLIMIT_CORE: 0, unix.RLIMIT_NOFILE: maxFiles} {
		var now unix.Rlimit
		err := unix.Prlimit(p.Pid, what, nil, &now)
		if err == nil {
			now.Max = min(now.Max, most)
			now.Cur = now.Max
			err = unix.Prlimit(p.Pid, what, &now, nil)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) { // it has ended already
			return fmt.Errorf("limit process %d: %w", p.Pid, err)
		}
	}
	return nil
}

// Wrapper says why a program can be no more than filtered; "" for one that is
// the program itself. What a script needs of the host is for the script to know.
func Wrapper(program string) (string, error) {
	f, err := os.Open(program)
	if err != nil {
		return "", fmt.Errorf("look at program: %w", err)
	}
	defer f.Close()
	magic := make([]byte, 2)
	if _, err := f.ReadAt(magic, 0); err != nil {
		return "", fmt.Errorf("look at program: %w", err)
	}
	if strings.HasPrefix(string(magic), "#!") {
		return fmt.Sprintf("%s is a script, which may need anything", program), nil
	}
	return "", nil
}
