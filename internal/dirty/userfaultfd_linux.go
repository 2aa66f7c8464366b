package dirty

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/dirty/inject"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// From the kernel's include/uapi/linux/userfaultfd.h.
const (
	ioctlUserfaultAPI      = 0xc018aa3f
	ioctlUserfaultRegister = 0xc020aa00

	userfaultAPI          = 0xaa
	userfaultUserModeOnly = 1
	userfaultModeProtect  = 1 << 1

	featureFaultFlag   = 1 << 0  // UFFD_FEATURE_PAGEFAULT_FLAG_WP
	featureUnpopulated = 1 << 13 // UFFD_FEATURE_WP_UNPOPULATED
	featureAsync       = 1 << 15 // UFFD_FEATURE_WP_ASYNC
)

type userfaultAPIArg struct{ api, features, ioctls uint64 }

type userfaultRange struct{ start, length uint64 }

type userfaultRegisterArg struct {
	userfaultRange
	mode, ioctls uint64
}

// userfault tracks by a userfaultfd that lives in the target.
type userfault struct {
	p *process
	// fd is our copy of the target's descriptor.
	fd int
	// mine are pages that were found to be the process's own since arm. They
	// stay so: nothing in QEMU gives a page of the memory back to the file.
	mine *Set
}

const userfaultLink = "anon_inode:[userfaultfd]"

// newUserfault finds the userfaultfd that an earlier tracker left in the
// process, or makes one.
func newUserfault(ctx context.Context, p *process) (*userfault, error) {
	links, err := p.descriptors()
	if err != nil {
		return nil, err
	}
	for n, link := range links {
		if link != userfaultLink {
			continue
		}
		u, err := adopt(p, n)
		if u != nil || err != nil {
			return u, err
		}
	}
	return create(ctx, p)
}

// adopt takes over a userfaultfd of the process; nil if it is not for the
// guest's memory.
func adopt(p *process, n int) (*userfault, error) {
	fd, err := p.fetch(n)
	if err != nil {
		return nil, err
	}
	u := &userfault{p: p, fd: fd}
	// EINVAL: it is set up already, unless its maker died just before.
	err = userfaultSetup(fd)
	if errors.Is(err, unix.EINVAL) {
		err = nil
	}
	if err == nil {
		err = u.register()
	}
	if err != nil {
		u.close()
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) {
			return nil, nil // another one holds the memory, or it is QEMU's own
		}
		return nil, err
	}
	return u, nil
}

// create makes a userfaultfd inside the process. On error none is left there.
func create(ctx context.Context, p *process) (u *userfault, err error) {
	err = inject.Do(ctx, p.pid, func(s *inject.Session) error {
		n, err := s.Call(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK|userfaultUserModeOnly)
		if err != nil {
			return err
		}
		if u, err = setUp(p, n); err != nil {
			_, cerr := s.Call(unix.SYS_CLOSE, uint64(n))
			return errors.Join(err, cerr)
		}
		return nil
	})
	if err != nil && u != nil {
		u.close()
	}
	if err != nil {
		return nil, fmt.Errorf("make userfaultfd: %w", p.refusal(err))
	}
	return u, nil
}

// setUp fetches a new userfaultfd of the process and makes it ready.
func setUp(p *process, n int) (*userfault, error) {
	fd, err := p.fetch(n)
	if err != nil {
		return nil, err
	}
	u := &userfault{p: p, fd: fd}
	if err = userfaultSetup(fd); err == nil {
		err = u.register()
	}
	if err != nil {
		u.close()
		return nil, err
	}
	return u, nil
}

func userfaultSetup(fd int) error {
	arg := userfaultAPIArg{api: userfaultAPI, features: featureAsync | featureUnpopulated | featureFaultFlag}
	if _, errno := ioctl(fd, ioctlUserfaultAPI, unsafe.Pointer(&arg)); errno != 0 {
		return fmt.Errorf("UFFDIO_API: %w", errno)
	}
	return nil
}

func (u *userfault) register() error {
	for _, s := range u.p.segments {
		arg := userfaultRegisterArg{userfaultRange: s.userfaultRange(), mode: userfaultModeProtect}
		_, errno := ioctl(u.fd, ioctlUserfaultRegister, unsafe.Pointer(&arg))
		switch errno {
		case 0:
		case unix.EBUSY:
			return errdefs.New(errdefs.Conflict, "UFFDIO_REGISTER: %w; another userfaultfd of the process tracks its memory", errno)
		default:
			return fmt.Errorf("UFFDIO_REGISTER: %w", errno)
		}
	}
	return nil
}

func (s segment) userfaultRange() userfaultRange {
	return userfaultRange{start: s.start, length: s.end - s.start}
}

// arm protects all of the process's own pages, in one step with finding them.
//
// A page is written, and so becomes the process's own, only by a fault that
// leaves it unprotected. So untouched pages and those of the file need no
// protection, which would cost a page table entry for each page of the memory
// and leave marks that look like swapped-out pages.
func (u *userfault) arm(private func(first, count int64)) error {
	u.mine = NewSet(u.p.size)
	return u.p.pagemapScan(protectOwn(), func(first, count int64) {
		u.mine.Add(first, count)
		private(first, count)
	})
}

// nearby is how many pages may lie between two that are looked at in one call:
// about as many as take the time of a call.
const nearby = 32

// scan finds the pages that became unprotected, and protects them. A page of
// the file that was read is among these once; it is left out, as it is not the
// process's own afterwards. If it is written to in between it is protected and
// its own, and reported; if it is written to later it becomes unprotected again.
func (u *userfault) scan(visit func(first, count int64)) error {
	written := NewSet(u.p.size)
	if err := u.p.pagemapScan(protectWritten(), written.Add); err != nil {
		return err
	}
	unknown := written.Clone()
	unknown.Remove(u.mine)
	if err := u.learn(unknown); err != nil {
		return err
	}
	written.And(u.mine)
	for offset, length := range written.Runs() {
		visit(offset/PageSize, length/PageSize)
	}
	return nil
}

// learn looks which of the pages are the process's own.
func (u *userfault) learn(unknown *Set) error {
	vec := make([]region, regionsPerCall)
	var from, to int64
	for offset, length := range unknown.Runs() {
		if offset-to > nearby*PageSize {
			if err := u.p.scanPart(own(), vec, from, to, u.mine.Add); err != nil {
				return err
			}
			from = offset
		}
		to = offset + length
	}
	return u.p.scanPart(own(), vec, from, to, u.mine.Add)
}

func (u *userfault) close() { _ = unix.Close(u.fd) }

// softDirty tracks by the kernel's soft-dirty bits.
type softDirty struct{ p *process }

func newSoftDirty(p *process) (softDirty, error) {
	return softDirty{p}, p.noUserfault()
}

// clearSoftDirty is "4" in Documentation/admin-guide/mm/soft-dirty.rst.
const clearSoftDirty = "4"

func (d softDirty) clear() error {
	f, err := d.p.open("clear_refs", unix.O_WRONLY)
	if err != nil {
		return d.p.refusal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(clearSoftDirty); err != nil {
		return fmt.Errorf("clear soft-dirty bits: %w", err)
	}
	return nil
}

func (d softDirty) arm(private func(first, count int64)) error {
	if err := d.p.private(private); err != nil {
		return err
	}
	return d.clear()
}

func (d softDirty) scan(visit func(first, count int64)) error {
	if err := d.p.entries(func(e uint64) bool { return e&entrySoftDirty != 0 }, visit); err != nil {
		return err
	}
	return d.clear()
}

func (softDirty) close() {}

// untracked reports all private pages each time.
type untracked struct{ p *process }

func (u untracked) arm(private func(first, count int64)) error {
	if err := u.p.noUserfault(); err != nil {
		return err
	}
	return u.p.private(private)
}

func (u untracked) scan(visit func(first, count int64)) error { return u.arm(visit) }

func (untracked) close() {}

// noUserfault refuses a process that has a userfaultfd, whose marks would
// pass for written pages.
func (p *process) noUserfault() error {
	links, err := p.descriptors()
	if err != nil {
		return err
	}
	for _, link := range links {
		if link == userfaultLink {
			return errdefs.New(errdefs.Conflict, "process %d is tracked by a userfaultfd; use the strategy %s", p.pid, Userfaultfd)
		}
	}
	return nil
}
