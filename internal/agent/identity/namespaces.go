//go:build linux

package identity

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// DestroyOutside destroys the guest's live TCP sockets whose other end is not
// in the guest, in every network namespace that a process is in, and returns
// how many that somebody had open there were. Their programs get ECONNABORTED
// at once (SOCK_DESTROY of sock_diag(7)), where they would wait in silence for
// an answer to a connection that nobody knows any more. Sockets that listen and
// connections within the guest stay. A kernel that cannot do so gives an error of
// kind UNSUPPORTED. Only process 1 of a guest may call it.
func DestroyOutside() (int, error) {
	names, _ := filepath.Glob("/proc/[0-9]*/ns/net") // the pattern is right
	return destroyIn(names)
}

// destroyIn is DestroyOutside for the namespaces of the links, each once.
func destroyIn(links []string) (int, error) {
	v := view{inside: map[netip.Addr]bool{}}
	defer v.close()
	err := v.visit(links)
	n := 0
	for _, d := range v.diags {
		k, derr := d.destroy(v.within)
		n += k
		err = errors.Join(err, derr)
	}
	return n, err
}

// view is all of the guest's network namespaces.
type view struct {
	diags  []*diag
	inside map[netip.Addr]bool // the guest's own addresses
}

func (v *view) close() {
	for _, d := range v.diags {
		d.close()
	}
}

// within reports whether an address is one of the guest's own.
func (v *view) within(a netip.Addr) bool {
	return a.IsLoopback() || a.IsUnspecified() || v.inside[a.WithZone("")]
}

// visit enters each namespace and notes its addresses.
func (v *view) visit(links []string) error {
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespaces: %w", err)
	}
	defer home.Close()
	seen := map[string]bool{}
	var failed error
	for _, name := range links {
		id, err := os.Readlink(name)
		if err != nil || seen[id] {
			continue // the process has ended
		}
		if err := v.enter(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			failed = errors.Join(failed, fmt.Errorf("enter network namespace %s: %w", id, err))
		} else if err == nil {
			seen[id] = true
		}
	}
	if err := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); err != nil {
		// The thread stays locked and ends with its goroutine.
		return errors.Join(failed, fmt.Errorf("leave network namespace: %w", err))
	}
	runtime.UnlockOSThread()
	return failed
}

// enter takes the thread into a namespace.
func (v *view) enter(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		return os.NewSyscallError("setns", err)
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return err
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			v.inside[p.Addr().Unmap().WithZone("")] = true
		}
	}
	d, err := openDiag()
	if err != nil {
		return err
	}
	v.diags = append(v.diags, d)
	return nil
}
