package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

type mount struct {
	source, point, fstype string
	flags                 uintptr
	options               string
}

// mount mounts, making the folder; what is mounted there already is right.
func (m mount) mount() error {
	if err := os.MkdirAll(m.point, 0o755); err != nil {
		return fmt.Errorf("mount %s: %w", m.point, err)
	}
	if err := unix.Mount(m.source, m.point, m.fstype, m.flags, m.options); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("mount %s on %s: %w", m.source, m.point, err)
	}
	return nil
}

// finish sets up what programs expect of a Linux system. None of it is worth
// not booting for.
func (b *boot) finish() {
	const noexec = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []mount{
		{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666"},
		{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
		{"mqueue", "/dev/mqueue", "mqueue", noexec, ""},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", noexec, "nsdelegate"},
	} {
		if err := m.mount(); err != nil {
			b.log.Warn("finish boot", "error", err)
		}
	}
	for link, target := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0",
		"/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		_ = os.Symlink(target, link) // a kernel may have made it
	}
	_ = os.Mkdir("/run/lock", 0o755)
	_ = os.Chmod("/run/lock", os.ModeSticky|0o777)
	if err := loopbackUp(); err != nil {
		b.log.Warn("finish boot", "error", err)
	}
	raiseLimits(b.log)
	b.mark("system")
}

// raiseLimits sets what commands inherit, as systemd has it: programs may ask for
// many files, few get them unasked.
func raiseLimits(log *slog.Logger) {
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 8192, Max: 524288}); err != nil {
		log.Warn("finish boot", "error", err)
	}
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r); err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	return nil
}

// ext4ResizeFS is EXT4_IOC_RESIZE_FS, _IOW('f', 16, __u64), of fs/ext4/ext4.h.
const ext4ResizeFS = 0x40086610

// grow lets the ext4 file system of disk, mounted at point, fill the disk.
func grow(disk, point string) (bool, error) {
	dev, err := os.Open(disk)
	if err != nil {
		return false, err
	}
	defer dev.Close()
	var super [1024]byte
	if _, err := dev.ReadAt(super[:], 1024); err != nil {
		return false, fmt.Errorf("read superblock: %w", err)
	}
	// Offsets of struct ext4_super_block: s_blocks_count_lo 4,
	// s_log_block_size 24, s_feature_incompat 96 (64BIT 0x80),
	// s_blocks_count_hi 336.
	le := binary.LittleEndian
	blockSize := uint64(1024) << le.Uint32(super[24:])
	blocks := uint64(le.Uint32(super[4:]))
	if le.Uint32(super[96:])&0x80 != 0 {
		blocks |= uint64(le.Uint32(super[336:])) << 32
	}
	var size uint64
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, dev.Fd(), unix.BLKGETSIZE64, uintptr(unsafe.Pointer(&size))); errno != 0 {
		return false, fmt.Errorf("ask for the size of %s: %w", disk, errno)
	}
	want := size / blockSize
	if want <= blocks {
		return false, nil
	}
	fs, err := os.Open(point)
	if err != nil {
		return false, err
	}
	defer fs.Close()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fs.Fd(), ext4ResizeFS, uintptr(unsafe.Pointer(&want))); errno != 0 {
		return false, fmt.Errorf("grow %s from %d to %d blocks: %w", disk, blocks, want, errno)
	}
	return true, nil
}

// events tells when the kernel finds a device (NETLINK_KOBJECT_UEVENT).
type events struct{ fd int }

func openEvents() (*events, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, fmt.Errorf("listen for devices: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("listen for devices: %w", err)
	}
	return &events{fd}, nil
}

func (e *events) close() { _ = unix.Close(e.fd) }

// await returns when there says yes; it asks again after each event.
func (e *events) await(limit time.Duration, there func() bool) error {
	deadline := time.Now().Add(limit)
	var buf [64 << 10]byte
	for !there() {
		left := time.Until(deadline)
		if left <= 0 {
			return fmt.Errorf("not there after %s", limit)
		}
		fds := []unix.PollFd{{Fd: int32(e.fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, int(left.Milliseconds())+1); err != nil && !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("poll", err)
		}
		for {
			// ENOBUFS: events were lost; we look again anyway.
			if n, err := unix.Read(e.fd, buf[:]); err != nil && !errors.Is(err, unix.ENOBUFS) || n == 0 {
				break
			}
		}
	}
	return nil
}
