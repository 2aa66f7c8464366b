package dirty

import (
	"context"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/dirty/inject"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// ReadOnly replaces the process's descriptors of the memory file that can
// write by ones that cannot, so that a process which its guest has taken over
// cannot change through them what others map. It returns how many it replaced.
// The mapping stays as it is: being private, it needs no more than to read.
// The guest may run.
//
// QEMU ≥ 8.2 opens the file so by itself (readonly=on,rom=off). What it does
// not prevent is that the process opens the file anew, by the name by which it
// opened it or through the descriptor that it is left with. For one that may not
// there is Spare: a descriptor opened by another name.
func ReadOnly(ctx context.Context, cfg Config) (int, error) {
	p, err := openProcess(cfg)
	if err != nil {
		return 0, err
	}
	defer p.close()
	writable, err := p.writable(cfg.MemoryFile)
	if err != nil || len(writable) == 0 {
		return 0, err
	}
	err = inject.Do(ctx, p.pid, func(s *inject.Session) error {
		for _, fd := range writable {
			if err := reopen(s, fd, cfg.Spare); err != nil {
				return err
			}
		}
		if cfg.Spare == 0 {
			return nil
		}
		_, err := s.Call(unix.SYS_CLOSE, uint64(cfg.Spare))
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("make memory file of process %d read-only: %w", cfg.PID, p.refusal(err))
	}
	left, err := p.writable(cfg.MemoryFile)
	if err == nil && len(left) > 0 {
		err = errdefs.New(errdefs.Internal, "memory file of process %d: descriptors %v can still write", cfg.PID, left)
	}
	return len(writable), err
}

// reopen puts a read-only description of the same file at the descriptor, that
// of spare if there is one.
func reopen(s *inject.Session, fd, spare int) error {
	if spare != 0 {
		_, err := s.Call(unix.SYS_DUP3, uint64(spare), uint64(fd), unix.O_CLOEXEC)
		return err
	}
	return s.WithString("/proc/self/fd/"+strconv.Itoa(fd), func(path uint64) error {
		at := unix.AT_FDCWD // a variable, since it is negative
		opened, err := s.Call(unix.SYS_OPENAT, uint64(at), path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		_, err = s.Call(unix.SYS_DUP3, uint64(opened), uint64(fd), unix.O_CLOEXEC)
		if _, cerr := s.Call(unix.SYS_CLOSE, uint64(opened)); err == nil {
			err = cerr
		}
		return err
	})
}

// writable are the descriptors of the file that can write.
func (p *process) writable(path string) ([]int, error) {
	var want unix.Stat_t
	if err := unix.Stat(path, &want); err != nil {
		return nil, fmt.Errorf("stat memory file %q: %w", path, err)
	}
	links, err := p.descriptors()
	if err != nil {
		return nil, err
	}
	var found []int
	for fd := range links {
		var st unix.Stat_t
		if err := unix.Fstatat(int(p.proc.Fd()), fmt.Sprintf("fd/%d", fd), &st, 0); err != nil || st.Dev != want.Dev || st.Ino != want.Ino {
			continue
		}
		flags, err := p.flags(fd)
		if err != nil {
			return nil, err
		}
		if flags&unix.O_ACCMODE != unix.O_RDONLY {
			found = append(found, fd)
		}
	}
	return found, nil
}

// flags are those that the descriptor was opened with.
func (p *process) flags(fd int) (int, error) {
	own, err := p.fetch(fd)
	if err != nil {
		return 0, err
	}
	defer unix.Close(own)
	return unix.FcntlInt(uintptr(own), unix.F_GETFL, 0)
}
