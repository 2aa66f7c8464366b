package dirty

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// process is the target. Its files belong to the one process that had the pid
// when they were opened: they give ESRCH or nothing once it has ended, even if
// the pid is used again.
type process struct {
	pid   int
	pidfd int
	// proc is /proc/PID.
	proc *os.File
	// mem and pagemap are opened before anything is changed: the permission
	// for all else is the same.
	mem, pagemap *os.File
	segments     []segment
	size         int64
}

// segment is one mapping of the memory file.
type segment struct {
	start, end uint64
	// offset is where in the memory file it begins.
	offset int64
}

func (s segment) length() int64 { return int64(s.end - s.start) }

func openProcess(cfg Config) (p *process, err error) {
	p = &process{pid: cfg.PID, pidfd: -1, size: cfg.MemoryBytes}
	defer func() {
		if err != nil {
			err = fmt.Errorf("look into process %d: %w", cfg.PID, p.refusal(err))
			p.close()
		}
	}()
	if p.pidfd, err = unix.PidfdOpen(cfg.PID, 0); err != nil {
		return p, fmt.Errorf("pidfd: %w", err)
	}
	if p.proc, err = os.OpenFile("/proc/"+strconv.Itoa(cfg.PID), unix.O_PATH|unix.O_DIRECTORY, 0); err != nil {
		return p, err
	}
	if p.mem, err = p.open("mem", os.O_RDONLY); err != nil {
		return p, err
	}
	if p.pagemap, err = p.open("pagemap", os.O_RDONLY); err != nil {
		return p, err
	}
	p.segments, err = p.findMemory(cfg.MemoryFile)
	return p, err
}

func (p *process) close() {
	for _, f := range []*os.File{p.mem, p.pagemap, p.proc} {
		if f != nil {
			_ = f.Close() // nothing was written
		}
	}
	if p.pidfd >= 0 {
		_ = unix.Close(p.pidfd)
	}
}

// open opens a file in /proc/PID.
func (p *process) open(name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(int(p.proc.Fd()), name, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /proc/%d/%s: %w", p.pid, name, err)
	}
	return os.NewFile(uintptr(fd), fmt.Sprintf("/proc/%d/%s", p.pid, name)), nil
}

// refusal gives errors of access and of a missing process their kinds. To
// others than root a process that has ended is one that they may not look into.
func (p *process) refusal(err error) error {
	exit := []unix.PollFd{{Fd: int32(p.pidfd), Events: unix.POLLIN}}
	if n, _ := unix.Poll(exit, 0); err != nil && n == 1 && exit[0].Revents&unix.POLLIN != 0 {
		return errdefs.New(errdefs.WrongState, "%w; the process has ended", err)
	}
	switch {
	case errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES):
		return errdefs.New(errdefs.Unsupported,
			"%w; this host does not let one process look into another: check /proc/sys/kernel/yama/ptrace_scope (0 or 1 is needed) and that both are of one user", err)
	case errors.Is(err, unix.ESRCH) || errors.Is(err, os.ErrNotExist):
		return errdefs.New(errdefs.WrongState, "%w; the process has ended", err)
	}
	return err
}

// findMemory finds where the memory file is mapped. A mapping is known by its
// inode and, as btrfs and overlayfs show other devices there than stat does,
// by its device or its path. The process keeps a file that was removed, whatever
// has its path by now.
func (p *process) findMemory(path string) ([]segment, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("stat memory file %q: %w", path, err)
	}
	maps, err := p.open("maps", os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer maps.Close()
	device := fmt.Sprintf("%02x:%02x", unix.Major(st.Dev), unix.Minor(st.Dev))
	var found []segment
	for lines := bufio.NewScanner(maps); ; {
		if !lines.Scan() {
			if err := lines.Err(); err != nil {
				return nil, fmt.Errorf("read %s: %w", maps.Name(), err)
			}
			break
		}
		m, ok := parseMapping(lines.Text())
		same := m.inode != 0 && m.inode == st.Ino && (m.device == device || m.path == path)
		if !ok || !same && m.path != path+removed {
			continue
		}
		if !strings.HasSuffix(m.perms, "p") {
			return nil, errdefs.New(errdefs.Unsupported, "memory file %q is mapped shared; it has to be private", path)
		}
		found = append(found, m.segment)
	}
	return covering(found, p.size, path)
}

// removed ends the path of a mapped file that was removed, in /proc/PID/maps.
const removed = " (deleted)"

// covering sorts the mappings and checks that they are the whole memory once.
func covering(found []segment, size int64, path string) ([]segment, error) {
	slices.SortFunc(found, func(a, b segment) int { return int(a.offset/PageSize) - int(b.offset/PageSize) })
	next := int64(0)
	for _, s := range found {
		if s.offset != next {
			return nil, fmt.Errorf("memory file %q is not mapped once from end to end: a mapping begins at offset %d, not %d", path, s.offset, next)
		}
		next += s.length()
	}
	if next != size {
		return nil, fmt.Errorf("memory file %q: %d bytes of it are mapped, not %d", path, next, size)
	}
	return found, nil
}

type mapping struct {
	segment
	perms, device, path string
	inode               uint64
}

// parseMapping reads a line of /proc/PID/maps.
func parseMapping(line string) (m mapping, ok bool) {
	f := strings.Fields(line)
	if len(f) < 5 {
		return m, false
	}
	from, to, _ := strings.Cut(f[0], "-")
	var errs [4]error
	m.start, errs[0] = strconv.ParseUint(from, 16, 64)
	m.end, errs[1] = strconv.ParseUint(to, 16, 64)
	m.offset, errs[2] = strconv.ParseInt(f[2], 16, 64)
	m.inode, errs[3] = strconv.ParseUint(f[4], 10, 64)
	m.perms, m.device = f[1], f[3]
	if i := strings.IndexByte(line, '/'); i >= 0 {
		m.path = line[i:]
	}
	return m, errors.Join(errs[:]...) == nil && m.start < m.end
}

// descriptors gives what each descriptor of the process leads to, as its link
// in /proc/PID/fd reads.
func (p *process) descriptors() (map[int]string, error) {
	dir, err := p.open("fd", os.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, p.refusal(err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", dir.Name(), err)
	}
	links := make(map[int]string, len(names))
	for _, name := range names {
		n, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		b := make([]byte, unix.PathMax)
		// One that was closed meanwhile is left out.
		if length, err := unix.Readlinkat(int(dir.Fd()), name, b); err == nil {
			links[n] = string(b[:length])
		}
	}
	return links, nil
}

// fetch gets a descriptor of the process for ourselves.
func (p *process) fetch(fd int) (int, error) {
	own, err := unix.PidfdGetfd(p.pidfd, fd, 0)
	if err != nil {
		return -1, fmt.Errorf("fetch descriptor %d of process %d: %w", fd, p.pid, p.refusal(err))
	}
	return own, nil
}

// readAt reads the guest's memory as the process sees it.
func (p *process) readAt(b []byte, off int64) (n int, err error) {
	for _, s := range p.segments {
		within := off + int64(n) - s.offset
		if n == len(b) || within < 0 || within >= s.length() {
			continue
		}
		part := b[n:min(int64(len(b)), int64(n)+s.length()-within)]
		m, err := p.mem.ReadAt(part, int64(s.start)+within)
		n += m
		if err != nil {
			return n, fmt.Errorf("read memory of process %d at offset %d: %w", p.pid, off+int64(n), ended(err))
		}
	}
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

// ended tells the end of a process from other failures: its files then read
// as empty.
func ended(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ESRCH) {
		return errdefs.New(errdefs.WrongState, "the process has ended")
	}
	return err
}
