//go:build linux

package identity

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

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
	// Most guests have none, or all of them in the namespace of process 1. That
	// is soon said, while to look for namespaces is most of what a guest does
	// that is told who it is. The two numbers are not of one instant: one that is
	// made between them could hide another, hence a second look.
	switch all, here := tcpSockets(); {
	case all == 0:
		return 0, nil
	case all > 0 && all == here:
		if all, here = tcpSockets(); all == here {
			return destroyIn([]string{ownNamespace})
		}
	}
	proc, err := os.Open("/proc")
	if err != nil {
		return 0, fmt.Errorf("list processes: %w", err)
	}
	defer proc.Close()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return 0, fmt.Errorf("list processes: %w", err)
	}
	var links []string
	for _, name := range names {
		if '0' <= name[0] && name[0] <= '9' {
			links = append(links, "/proc/"+name+"/ns/net")
		}
	}
	return destroyIn(links)
}

// tcpSockets is how many TCP sockets there are in all namespaces, in whatever
// state, and how many that have an address in the one of this process; -1 for
// what the kernel does not say.
func tcpSockets() (all, here int) {
	six, err := os.ReadFile("/proc/net/sockstat6")
	if err != nil {
		six = []byte("TCP6: inuse 0") // a kernel without IPv6
	}
	four, err := os.ReadFile("/proc/net/sockstat")
	if err != nil {
		return -1, -1
	}
	return countTCP(string(four), string(six))
}

// countTCP is tcpSockets for the contents of the two files, of which "inuse" is
// about one namespace and "alloc" is about all, and about both families.
func countTCP(sockstat, sockstat6 string) (all, here int) {
	all = sockets(sockstat, "TCP:", "alloc")
	four, six := sockets(sockstat, "TCP:", "inuse"), sockets(sockstat6, "TCP6:", "inuse")
	if all < 0 || four < 0 || six < 0 {
		return -1, -1
	}
	return all, four + six
}

// sockets finds a number by the first word of its line and the word before it;
// -1 for none.
func sockets(sockstat, protocol, what string) int {
	for line := range strings.Lines(sockstat) {
		words := strings.Fields(line)
		if i := slices.Index(words, what); i > 0 && i+1 < len(words) && words[0] == protocol {
			if n, err := strconv.Atoi(words[i+1]); err == nil {
				return n
			}
		}
	}
	return -1
}

// destroyIn is DestroyOutside for the namespaces of the links, each once. What
// the guest's own addresses are is asked only when a socket is left for which it
// matters: usually there is none, and each question costs a guest that goes on
// under emulation some milliseconds.
func destroyIn(links []string) (int, error) {
	var all []*remote
	diags, err := inEach(links, openDiag)
	defer func() {
		for _, d := range diags {
			d.Close()
		}
	}()
	for _, d := range diags {
		list, lerr := d.remotes()
		all, err = append(all, list...), errors.Join(err, lerr)
	}
	if len(all) == 0 {
		return 0, err
	}
	lists, aerr := inEach(links, net.InterfaceAddrs)
	if aerr != nil {
		return 0, errors.Join(err, aerr) // one that is inside would be destroyed
	}
	inside := map[netip.Addr]bool{}
	for _, a := range slices.Concat(lists...) {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			inside[p.Addr().Unmap().WithZone("")] = true
		}
	}
	n, derr := destroy(all, func(a netip.Addr) bool { return inside[a.WithZone("")] })
	return n, errors.Join(err, derr)
}

// ownNamespace is that of the thread.
const ownNamespace = "/proc/thread-self/ns/net"

// inEach gives what f gives in each network namespace of the links. Of one that
// f fails in it gives the error, after all others.
func inEach[T any](links []string, f func() (T, error)) (all []T, err error) {
	own, err := os.Readlink(ownNamespace)
	if err != nil {
		return nil, fmt.Errorf("find network namespace: %w", err)
	}
	var here bool
	var others []string
	for _, name := range links {
		switch id, err := os.Readlink(name); {
		case err != nil: // the process has ended
		case id == own:
			here = true
		default:
			others = append(others, name)
		}
	}
	if here {
		var got T
		if got, err = f(); err != nil {
			err = fmt.Errorf("in network namespace %s: %w", own, err)
		} else {
			all = append(all, got)
		}
	}
	if len(others) == 0 {
		return all, err
	}
	more, oerr := inOthers(others, f)
	return append(all, more...), errors.Join(err, oerr)
}

// inOthers is inEach for namespaces that the thread has to enter for it.
func inOthers[T any](links []string, f func() (T, error)) (all []T, failed error) {
	runtime.LockOSThread()
	home, err := os.Open(ownNamespace)
	if err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("enter network namespaces: %w", err)
	}
	defer home.Close()
	seen := map[string]bool{}
	for _, name := range links {
		id, err := os.Readlink(name)
		if err != nil || seen[id] {
			continue // the process has ended
		}
		err = enter(name)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		seen[id] = err == nil
		var got T
		if err == nil {
			got, err = f()
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("in network namespace %s: %w", id, err))
			continue
		}
		all = append(all, got)
	}
	if err := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); err != nil {
		// The thread stays locked and ends with its goroutine.
		return all, errors.Join(failed, fmt.Errorf("leave network namespace: %w", err))
	}
	runtime.UnlockOSThread()
	return all, failed
}

// enter takes the thread into a namespace.
func enter(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return os.NewSyscallError("setns", unix.Setns(int(f.Fd()), unix.CLONE_NEWNET))
}
