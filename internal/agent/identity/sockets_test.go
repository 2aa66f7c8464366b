//go:build linux

package identity

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func epoch() time.Time { return time.Unix(1e9, 0) }

// inNamespace makes this very test binary run destroy in a network namespace
// of its own.
const inNamespace = "HOLDPOINT_TEST_IN_NAMESPACE"

func TestMain(m *testing.M) {
	if os.Getenv(inNamespace) != "" {
		if err := inOwnNamespace(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestCountTCP(t *testing.T) {
	const four, six = "sockets: used 9\nTCP: inuse 2 orphan 0 tw 3 alloc 5 mem 1\nUDP: inuse 7 mem 0\n", "TCP6: inuse 3\nUDP6: inuse 8\n"
	if all, here := countTCP(four, six); all != 5 || here != 5 {
		t.Errorf("%d in all, %d here", all, here)
	}
	for _, other := range [][2]string{
		{"", six},
		{four, ""},
		{"TCP: inuse 0 orphan 0\n", six},
		{"UDP: inuse 0 alloc 0\n", six},
		{"TCP: alloc", six},
		{"TCP: inuse x alloc 0", six},
		{"TCP: inuse 0 alloc -5", six},
	} {
		if all, here := countTCP(other[0], other[1]); all >= 0 || here >= 0 {
			t.Errorf("%q: %d in all, %d here", other, all, here)
		}
	}
}

// TestTCPSocketsOfThisKernel: each way to have one is counted.
func TestTCPSocketsOfThisKernel(t *testing.T) {
	for _, network := range []string{"tcp4", "tcp6"} {
		l, err := net.Listen(network, "localhost:0")
		if err != nil {
			t.Log(err)
			continue
		}
		defer l.Close()
		near, err := net.Dial(network, l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer near.Close()
		if all, here := tcpSockets(); here < 2 || all < here {
			t.Errorf("%s: %d in all, %d here", network, all, here)
		}
	}
}

func TestDestroyOutside(t *testing.T) {
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("ip(8) is missing: addresses cannot be given to the namespace")
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^$")
	cmd.Env = append(os.Environ(), inNamespace+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, syscall.EPERM) {
		t.Skip("user namespaces are forbidden here")
	}
	if strings.Contains(string(out), errNoDiag.Error()) {
		t.Skip(string(out))
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

var errNoDiag = errors.New("this kernel cannot destroy sockets")

// pair is one connection.
type pair struct{ near, far net.Conn }

// inOwnNamespace is the test. Addresses that are local by a route only are
// those of no interface, and hence outside.
func inOwnNamespace() error {
	for _, args := range []string{
		"link set lo up", "addr add 192.0.2.1/32 dev lo", "addr add 2001:db8::1/128 dev lo",
		"route add local 198.51.100.0/24 dev lo", "-6 route add local 2001:db8:1::/64 dev lo",
	} {
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", args, err, out)
		}
	}
	inside, outside := map[string]*pair{}, map[string]*pair{}
	for _, addr := range []string{"127.0.0.1", "::1", "192.0.2.1", "2001:db8::1"} {
		if err := connectTo(addr, inside); err != nil {
			return err
		}
	}
	for _, addr := range []string{"198.51.100.7", "2001:db8:1::7", "::ffff:198.51.100.8"} {
		if err := connectTo(addr, outside); err != nil {
			return err
		}
	}
	// Half closed, and waiting for the rest.
	if err := outside["198.51.100.7"].near.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	if err := visitsAnother(); err != nil {
		return err
	}
	me := fmt.Sprintf("/proc/%d/ns/net", os.Getpid())
	n, err := destroyIn([]string{me, "/proc/self/ns/net", "/proc/0/ns/net"})
	if errdefs.Is(err, errdefs.Unsupported) {
		return errNoDiag
	}
	// The end of one end resets the other, which then is not there any more.
	if err != nil || n < len(outside) || n > 2*len(outside) {
		return fmt.Errorf("destroyed %d sockets of %d connections: %v", n, len(outside), err)
	}
	for addr, p := range inside {
		if err := p.alive(); err != nil {
			return fmt.Errorf("%s, which is inside: %w", addr, err)
		}
	}
	for addr, p := range outside {
		aborted := 0
		for _, c := range []net.Conn{p.near, p.far} {
			_, err := c.Read(make([]byte, 1))
			switch {
			case errors.Is(err, unix.ECONNABORTED):
				aborted++
			case errors.Is(err, io.EOF) && c == outside["198.51.100.7"].far: // half closed
			case !errors.Is(err, unix.ECONNRESET):
				return fmt.Errorf("%s, which is outside: read: %v", addr, err)
			}
		}
		if aborted == 0 {
			return fmt.Errorf("%s, which is outside, was not aborted", addr)
		}
	}
	if n, err := destroyIn([]string{me}); n != 0 || err != nil {
		return fmt.Errorf("again: destroyed %d, %v", n, err)
	}
	// What listens and what comes later is not concerned.
	if err := connectTo("198.51.100.9", outside); err != nil {
		return err
	}
	return outside["198.51.100.9"].alive()
}

// visitsAnother holds that each namespace is visited once, and left again.
func visitsAnother() error {
	other := exec.Command("sleep", "60")
	other.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	if err := other.Start(); err != nil {
		return err
	}
	defer func() {
		_ = other.Process.Kill()
		_ = other.Wait() // it was killed
	}()
	there := fmt.Sprintf("/proc/%d/ns/net", other.Process.Pid)
	want, err := os.Readlink(there)
	if err != nil {
		return err
	}
	home := func() (string, error) { return os.Readlink(ownNamespace) }
	own, err := home()
	if err != nil {
		return err
	}
	seen, err := inEach([]string{"/proc/self/ns/net", there, "/proc/0/ns/net", there, "/proc/self/ns/net"}, home)
	if err != nil || len(seen) != 2 || seen[0] != own || seen[1] != want || own == want {
		return fmt.Errorf("visited %q of %q and %q, %w", seen, own, want, err)
	}
	if after, err := home(); err != nil || after != own {
		return fmt.Errorf("left in %q, not %q, %w", after, own, err)
	}
	return nil
}

func connectTo(addr string, into map[string]*pair) error {
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		return err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return err
	}
	near, err := net.Dial("tcp", net.JoinHostPort(addr, port))
	if err != nil {
		return err
	}
	far, err := l.Accept()
	if err != nil {
		return err
	}
	into[addr] = &pair{near, far}
	return into[addr].alive()
}

func (p *pair) alive() error {
	for _, c := range []net.Conn{p.near, p.far} {
		if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			return err
		}
	}
	if _, err := p.near.Write([]byte("x")); err != nil {
		return err
	}
	_, err := p.far.Read(make([]byte, 1))
	return err
}
