//go:build linux

// Package identity makes a guest who it is told to be: the files that name it,
// its host name, the kernel's random numbers and wall clock, and the end of TCP
// connections that belonged to another instant. It acts when it is asked and
// keeps nothing; when a guest is told what is for package agent.
package identity

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Check refuses, with kind INVALID, a host name or machine id that is none.
// Empty is right for both and means that it stays as it is.
func Check(hostname, machineID string) error {
	if machineID != "" && (len(machineID) != 32 || strings.Trim(machineID, "0123456789abcdef") != "") {
		return errdefs.New(errdefs.Invalid, "machine id %q: use 32 lower-case hexadecimal digits", machineID)
	}
	if strings.ContainsAny(hostname, " \t\n\x00/") || len(hostname) > 64 {
		return errdefs.New(errdefs.Invalid, "host name %q: use at most 64 letters, digits and -", hostname)
	}
	return nil
}

// WriteFiles writes the files below root that name a machine: /etc/machine-id,
// /etc/hostname and the line of /etc/hosts. Those that are right already stay
// untouched, so that a boot writes nothing to the disk; what stands for an
// empty argument stays too. Programs that read at the same time see the old
// content or the new one; of a name that gets another length they may, for the
// moment of the write, see the end of one behind the beginning of the other. A
// file that cannot be written does not keep it from the others. Where something
// else than a file has the place of one, so that it names no other machine
// either, no file is written, and misplaced says which.
func WriteFiles(root, hostname, machineID string) (misplaced []string, err error) {
	put := func(name, content string, failed error) {
		if failed == nil {
			failed = write(root, name, content)
		}
		switch {
		case errors.Is(failed, syscall.EISDIR) || errors.Is(failed, syscall.ENOTDIR) || errors.Is(failed, syscall.EFBIG):
			misplaced = append(misplaced, "/"+name)
		case failed != nil:
			err = errors.Join(err, fmt.Errorf("write /%s: %w", name, failed))
		}
	}
	if machineID != "" {
		put("etc/machine-id", machineID+"\n", nil)
	}
	if hostname != "" {
		put("etc/hostname", hostname+"\n", nil)
		old, failed := read(filepath.Join(root, "etc/hosts"))
		if os.IsNotExist(failed) || errors.Is(failed, syscall.ELOOP) {
			failed = nil
		}
		put("etc/hosts", hosts(old, hostname), failed)
	}
	return misplaced, err
}

// hosts gives the lines of a hosts file the machine's name, on the address
// that Debian uses for it.
func hosts(old, name string) string {
	if old == "" {
		old = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
	}
	var b strings.Builder
	for line := range strings.Lines(old) {
		if f := strings.Fields(line); len(f) > 0 && f[0] == "127.0.1.1" {
			continue
		}
		b.WriteString(strings.TrimRight(line, "\n") + "\n")
	}
	return b.String() + "127.0.1.1 " + name + "\n"
}

// write gives a file its content. Where only the last line differs, as it does
// once the machine has had a name, that line is written in place: the file
// stays the one that containers of the guest have mounted, and a guest that
// goes on under emulation, where each new path through the kernel costs, need
// not make, rename and remove a file. Others are replaced by a new one, unless
// that cannot be: a mount point cannot be replaced, and a full disk has no room
// for a second file. What is no file is replaced, and never written through: a
// link may lead to anything.
func write(root, name, content string) error {
	full := filepath.Join(root, name)
	fi, err := os.Lstat(full)
	switch {
	case os.IsNotExist(err):
		if err = os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			return err
		}
		return replace(full, content)
	case err != nil:
		return err
	case fi.IsDir():
		return syscall.EISDIR
	case !fi.Mode().IsRegular():
		return replace(full, content)
	}
	old, err := read(full)
	switch {
	case err != nil:
		return err
	case old == content:
		return nil
	case lastLine(old) == lastLine(content) && old[:lastLine(old)] == content[:lastLine(content)]:
		return overwrite(full, content, lastLine(content), len(old))
	case replace(full, content) != nil:
		return overwrite(full, content, 0, len(old))
	}
	return nil
}

// largest is the size of a file that is read, in bytes: some lists of hosts
// have millions of lines, which no guest should hold twice.
const largest = 4 << 20

// read reads a file, or one that a link leads to, and waits for nothing else.
func read(full string) (string, error) {
	f, err := os.OpenFile(full, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	fi, err := f.Stat()
	switch {
	case err != nil:
		return "", err
	case fi.IsDir():
		return "", syscall.EISDIR
	case !fi.Mode().IsRegular():
		return "", nil // nothing of it is worth keeping
	case fi.Size() > largest:
		return "", syscall.EFBIG
	}
	b, err := io.ReadAll(io.LimitReader(f, largest))
	return string(b), err
}

// lastLine is where the last line of a text begins.
func lastLine(text string) int {
	return strings.LastIndexByte(strings.TrimSuffix(text, "\n"), '\n') + 1
}

// overwrite writes what differs, from an offset on, into a file of a length. It
// never leaves less in the file than was there or is to be there.
func overwrite(full, content string, from, length int) error {
	f, err := os.OpenFile(full, os.O_WRONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte(content[from:]), int64(from)); err != nil || length <= len(content) {
		return err
	}
	return f.Truncate(int64(len(content)))
}

// replace puts a new file, with the owner and mode of the old one, in its place.
func replace(full, content string) error {
	f, err := os.CreateTemp(filepath.Dir(full), "."+filepath.Base(full)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // it is not there after the rename
	defer f.Close()
	mode := os.FileMode(0o644)
	if fi, err := os.Lstat(full); err == nil && fi.Mode().IsRegular() {
		mode = fi.Mode().Perm()
		if st, ok := fi.Sys().(*syscall.Stat_t); ok {
			_ = f.Chown(int(st.Uid), int(st.Gid)) // its content is what matters
		}
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if _, err := f.WriteString(content); err != nil {
		return err
	}
	return os.Rename(f.Name(), full)
}
