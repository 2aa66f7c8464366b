package dirty

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// The PAGEMAP_SCAN ioctl, from the kernel's include/uapi/linux/fs.h (Linux 6.7).
const (
	ioctlPagemapScan = 0xc0606610

	pageIsWritten = 1 << 1
	pageIsFile    = 1 << 2
	pageIsPresent = 1 << 3
	pageIsSwapped = 1 << 4

	scanProtect    = 1 << 0 // PM_SCAN_WP_MATCHING
	scanCheckAsync = 1 << 1 // PM_SCAN_CHECK_WPASYNC
)

// scanArg is struct pm_scan_arg.
type scanArg struct {
	size, flags, start, end, walkEnd      uint64
	vec, vecLen, maxPages                 uint64
	inverted, mask, anyOfMask, returnMask uint64
}

// region is struct page_region.
type region struct {
	start, end, categories uint64
}

// regionsPerCall is how many regions one call may return: 96 KiB.
const regionsPerCall = 4096

// pagemapScan calls visit for the runs of pages in the process's memory that
// the request selects.
func (p *process) pagemapScan(request scanArg, visit func(first, count int64)) error {
	return p.scanPart(request, make([]region, regionsPerCall), 0, p.size, visit)
}

// scanPart does so for the memory from one offset to another. vec is space for
// the answers.
func (p *process) scanPart(request scanArg, vec []region, from, to int64, visit func(first, count int64)) error {
	for _, s := range p.segments {
		start, end := max(from-s.offset, 0), min(to-s.offset, s.length())
		if start >= end {
			continue
		}
		err := scanRange(p.pagemap, request, s.start+uint64(start), s.start+uint64(end), vec, func(r region) {
			visit((s.offset+int64(r.start-s.start))/PageSize, int64(r.end-r.start)/PageSize)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func scanRange(pagemap *os.File, arg scanArg, start, end uint64, vec []region, visit func(region)) error {
	arg.size = uint64(unsafe.Sizeof(arg))
	for start < end {
		arg.start, arg.end, arg.walkEnd = start, end, 0
		arg.vec, arg.vecLen = uint64(uintptr(unsafe.Pointer(&vec[0]))), uint64(len(vec))
		n, errno := ioctl(int(pagemap.Fd()), ioctlPagemapScan, unsafe.Pointer(&arg))
		runtime.KeepAlive(vec)
		if errno != 0 {
			return fmt.Errorf("PAGEMAP_SCAN: %w", scanError(errno))
		}
		for _, r := range vec[:min(n, len(vec))] {
			visit(r)
		}
		if arg.walkEnd <= start {
			return fmt.Errorf("PAGEMAP_SCAN stopped at %#x without progress", start)
		}
		start = arg.walkEnd
	}
	return nil
}

func scanError(errno unix.Errno) error {
	switch errno {
	case unix.ENOTTY:
		return errdefs.As(errdefs.Unsupported, errors.Join(errNoStrategy, errno))
	case unix.EPERM:
		return fmt.Errorf("%w: a part of the memory is not tracked any more", errno)
	case unix.ESRCH:
		return ended(errno)
	}
	return errno
}

func ioctl(fd int, request uintptr, arg unsafe.Pointer) (int, unix.Errno) {
	for {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}

// own selects the process's own pages: in memory or swapped out, and not the
// file's.
func own() scanArg {
	return scanArg{
		inverted: pageIsFile, mask: pageIsFile,
		anyOfMask: pageIsPresent | pageIsSwapped, returnMask: pageIsPresent,
	}
}

// protectOwn selects them too, and protects them.
func protectOwn() scanArg {
	request := own()
	request.flags = scanProtect | scanCheckAsync
	return request
}

// protectWritten selects all pages that are there and were not protected, and
// protects them. Those of the file are among them: to tell them, the kernel
// has to look at a structure for each page of the memory, which takes fifty
// times as long.
func protectWritten() scanArg {
	return scanArg{
		flags: scanProtect | scanCheckAsync, mask: pageIsWritten,
		anyOfMask: pageIsPresent | pageIsSwapped, returnMask: pageIsWritten,
	}
}

// The bits of an entry of /proc/PID/pagemap, from the kernel's
// Documentation/admin-guide/mm/pagemap.rst.
const (
	entrySoftDirty = 1 << 55
	entryFile      = 1 << 61
	entrySwapped   = 1 << 62
	entryPresent   = 1 << 63
)

// private calls visit for the process's own pages.
func (p *process) private(visit func(first, count int64)) error {
	err := p.pagemapScan(own(), visit)
	if errors.Is(err, errNoStrategy) {
		return p.entries(isPrivate, visit)
	}
	return err
}

func isPrivate(entry uint64) bool {
	return entry&(entryPresent|entrySwapped) != 0 && entry&entryFile == 0
}

// entries calls visit for the runs of pages whose entry in /proc/PID/pagemap
// is one of those asked for.
func (p *process) entries(wanted func(entry uint64) bool, visit func(first, count int64)) error {
	b := make([]byte, 64<<10)
	for _, s := range p.segments {
		pages := s.length() / PageSize
		first := s.offset / PageSize
		for done := int64(0); done < pages; {
			part := b[:min(int64(len(b)), (pages-done)*8)]
			if _, err := p.pagemap.ReadAt(part, int64(s.start/PageSize+uint64(done))*8); err != nil {
				return fmt.Errorf("read %s: %w", p.pagemap.Name(), ended(err))
			}
			count := int64(len(part) / 8)
			visitRuns(part, wanted, first+done, visit)
			done += count
		}
	}
	return nil
}

// visitRuns calls visit for the runs of wanted entries in b; the first entry
// is that of page first.
func visitRuns(b []byte, wanted func(uint64) bool, first int64, visit func(first, count int64)) {
	n := int64(len(b) / 8)
	begin := int64(-1)
	for i := int64(0); i <= n; i++ {
		hit := i < n && wanted(binary.NativeEndian.Uint64(b[i*8:]))
		switch {
		case hit && begin < 0:
			begin = i
		case !hit && begin >= 0:
			visit(first+begin, i-begin)
			begin = -1
		}
	}
}
