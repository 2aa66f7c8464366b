//go:build linux

package isolation

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The variable that makes the test's own program the prisoner, which tries what is in
// attempts, and the file in which it says what it could do.
const (
	prisonVariable = "HOLDPOINT_TEST_PRISON"
	reportFile     = "report"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(prisonVariable); dir != "" {
		if err := tryAll(prison{dir}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// prison is the folder with all that the attempts are about: own is the program's,
// read is given to read, others is not given at all.
type prison struct{ dir string }

func (p prison) own(name string) string    { return filepath.Join(p.dir, "own", name) }
func (p prison) read(name string) string   { return filepath.Join(p.dir, "read", name) }
func (p prison) others(name string) string { return filepath.Join(p.dir, "others", name) }

// The parts as a set.
const (
	files = 1 << iota
	calls
	namespaces
)

func without(set int) Without {
	w := Without{}
	for bit, part := range map[int]Part{files: Files, calls: Calls, namespaces: Namespaces} {
		if set&bit != 0 {
			w[part] = "turned off"
		}
	}
	return w
}

// attempt is one thing that a program which the guest has taken over may try.
type attempt struct {
	name string
	// refusedBy is the part, or the parts, one of which is enough.
	refusedBy int
	// abi is the version of Landlock that is needed; by Files alone.
	abi int
	try func(p prison) error
}

// permitted are what a machine lives by.
func permitted() []attempt {
	return []attempt{
		{"read what is given", 0, 0, func(p prison) error { return readFile(p.read("layer")) }},
		{"write to its own file", 0, 0, func(p prison) error { return writeFile(p.own("file")) }},
		{"make and remove a file of its own", 0, 0, func(p prison) error {
			return errors.Join(os.WriteFile(p.own("new"), nil, 0o600), os.Remove(p.own("new")))
		}},
		{"listen at a name of its own", 0, 0, func(p prison) error {
			l, err := net.Listen("unix", p.own("s"))
			if err == nil {
				err = l.Close()
			}
			return err
		}},
		{"track the pages of its own memory", 0, 0, func(prison) error {
			const userModeOnly = 1
			fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|userModeOnly, 0, 0)
			if errno != 0 {
				return errno
			}
			return unix.Close(int(fd))
		}},
	}
}

// attempts are the escapes. Each works for the same program without isolation.
func attempts() []attempt {
	return []attempt{
		{"read /etc/passwd", files, 1, func(prison) error { return readFile("/etc/passwd") }},
		{"list the root", files, 1, func(prison) error { _, err := os.ReadDir("/"); return err }},
		{"read the catalog", files, 1, func(p prison) error { return readFile(p.others("catalog.db")) }},
		{"read another machine's memory", files, 1, func(p prison) error { return readFile(p.others("memory")) }},
		{"write to another machine's disk", files, 1, func(p prison) error { return writeFile(p.others("memory")) }},
		{"write to a layer", files, 1, func(p prison) error { return writeFile(p.read("layer")) }},
		{"write to a layer by a descriptor", files, 1, func(p prison) error {
			f, err := os.Open(p.read("layer"))
			if err != nil {
				return err
			}
			defer f.Close()
			return writeFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
		}},
		{"shorten a layer", files, 3, func(p prison) error { return os.Truncate(p.read("layer"), 1) }},
		{"remove a layer", files, 1, func(p prison) error { return os.Remove(p.read("spare")) }},
		{"make a file outside", files, 1, func(p prison) error { return os.WriteFile(p.others("new"), nil, 0o600) }},
		{"make a folder of its own", files, 1, func(p prison) error { return os.Mkdir(p.own("folder"), 0o700) }},
		{"change the mode of a layer", calls, 0, func(p prison) error { return os.Chmod(p.read("layer"), 0o666) }},
		{"change another machine's times", calls, 0, func(p prison) error { return os.Chtimes(p.others("memory"), time.Now(), time.Now()) }},
		{"keep a second name of its file", calls, 0, func(p prison) error { return os.Link(p.own("file"), p.own("second")) }},
		{"run a program", files, 1, func(prison) error { return exec.Command("/bin/true").Run() }},
		{"connect to the daemon's socket", calls, 0, func(p prison) error { return connect("unix", p.others("daemon.sock")) }},
		{"connect to an abstract socket", calls, 0, func(p prison) error { return connect("unix", p.abstract()) }},
		{"connect to loopback", calls, 0, func(p prison) error { return connect("tcp", p.port()) }},
		{"make a socket of the internet", calls, 0, func(prison) error { return socket(unix.AF_INET, unix.SOCK_DGRAM) }},
		{"make a socket of netlink", calls, 0, func(prison) error { return socket(unix.AF_NETLINK, unix.SOCK_RAW) }},
		{"make a socket for datagrams", calls, 0, func(prison) error { return socket(unix.AF_UNIX, unix.SOCK_DGRAM) }},
		{"make a ring", calls, 0, func(prison) error {
			var params [120]byte
			fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
			if errno != 0 {
				return errno
			}
			return unix.Close(int(fd))
		}},
		{"signal another process", calls | namespaces, 0, func(p prison) error { return unix.Kill(p.bystander(), 0) }},
		{"signal a thread of another process", files | namespaces, 6, func(p prison) error { return unix.Tgkill(p.bystander(), p.bystander(), 0) }},
		{"trace another process", files | calls | namespaces, 1, func(p prison) error { return traced(p.bystander()) }},
		{"read another process's memory", files | namespaces, 1, func(p prison) error {
			return readFile(fmt.Sprintf("/proc/%d/mem", p.bystander()))
		}},
		{"read another process's environment", files, 1, func(p prison) error {
			return readFile(fmt.Sprintf("/proc/%d/environ", p.bystander()))
		}},
		{"leave for namespaces of its own", calls, 0, func(prison) error { return unix.Unshare(unix.CLONE_FS) }},
	}
}

func readFile(path string) error {
	f, err := os.Open(path)
	if err == nil {
		err = f.Close()
	}
	return err
}

func writeFile(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		err = f.Close()
	}
	return err
}

func connect(network, address string) error {
	c, err := net.DialTimeout(network, address, 5*time.Second)
	if err == nil {
		err = c.Close()
	}
	return err
}

func socket(domain, kind int) error {
	fd, err := unix.Socket(domain, kind, 0)
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

func traced(pid int) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.PtraceSeize(pid); err != nil {
		return err
	}
	if err := unix.PtraceInterrupt(pid); err != nil {
		return err
	}
	if _, err := unix.Wait4(pid, nil, unix.WALL, nil); err != nil {
		return err
	}
	return unix.PtraceDetach(pid)
}

// tryAll writes a line for each attempt: its name and how it went.
func tryAll(p prison) error {
	var b strings.Builder
	for _, a := range append(permitted(), attempts()...) {
		fmt.Fprintf(&b, "%s\t%v\n", a.name, a.try(p))
	}
	return os.WriteFile(p.own(reportFile), []byte(b.String()), 0o600)
}

// told is what the prison has for the prisoner to know.
func (p prison) told(name string) string {
	b, err := os.ReadFile(p.read(name))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func (p prison) abstract() string { return p.told("abstract") }
func (p prison) port() string     { return p.told("port") }

func (p prison) bystander() int {
	pid, err := strconv.Atoi(p.told("bystander"))
	if err != nil {
		return 0
	}
	return pid
}

// newPrison makes it, with sockets that accept and a process that stands by.
func newPrison(t *testing.T) prison {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "hpi") // a short path, for sockets
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := prison{dir}
	for _, folder := range []string{"own", "read", "others"} {
		must(t, os.Mkdir(filepath.Join(dir, folder), 0o700))
	}
	bystander := exec.Command("sleep", "600")
	must(t, bystander.Start())
	t.Cleanup(func() {
		_ = bystander.Process.Kill()
		_ = bystander.Wait()
	})
	abstract := "@holdpoint-test-" + filepath.Base(dir)
	tcp := listen(t, "tcp", "127.0.0.1:0")
	listen(t, "unix", abstract)
	listen(t, "unix", p.others("daemon.sock"))
	for path, content := range map[string]string{
		p.own("file"): "", p.read("layer"): "layer", p.read("spare"): "", p.others("catalog.db"): "", p.others("memory"): "",
		p.read("abstract"): abstract, p.read("port"): tcp, p.read("bystander"): strconv.Itoa(bystander.Process.Pid),
	} {
		must(t, os.WriteFile(path, []byte(content), 0o600))
	}
	return p
}

func listen(t *testing.T, network, address string) string {
	t.Helper()
	l, err := net.Listen(network, address)
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// spec is what the prisoner is given.
func (p prison) spec(t *testing.T) Spec {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	return Spec{
		Read: []string{filepath.Join(p.dir, "read"), "/dev/null", "/etc/ld.so.cache", "/not/there"}, Execute: []string{self, "/lib", "/lib64", "/usr/lib", "/usr/lib64"},
		Write: []string{p.own("file"), "/dev/null"}, Folders: []string{filepath.Join(p.dir, "own")},
	}
}

// command makes the prisoner.
func (p prison) command(t *testing.T) func() *exec.Cmd {
	self, err := os.Executable()
	must(t, err)
	return func() *exec.Cmd {
		cmd := exec.Command(self)
		cmd.Env = []string{prisonVariable + "=" + p.dir}
		cmd.Stderr = os.Stderr
		return cmd
	}
}

// report is how each attempt went.
func (p prison) report(t *testing.T) map[string]string {
	t.Helper()
	b, err := os.ReadFile(p.own(reportFile))
	must(t, err)
	went := map[string]string{}
	for line := range strings.Lines(string(b)) {
		name, how, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		went[name] = how
	}
	return went
}

// await is for the end of a process that was started.
func await(t *testing.T, p *os.Process) {
	t.Helper()
	st, err := p.Wait()
	must(t, err)
	if !st.Success() {
		t.Fatalf("the program ended with %s", st)
	}
}

const worked = "<nil>"

// TestAttemptsWorkWithoutIsolation shows that the attempts are real ones.
func TestAttemptsWorkWithoutIsolation(t *testing.T) {
	p := newPrison(t)
	cmd := p.command(t)()
	must(t, cmd.Run())
	for name, how := range p.report(t) {
		if how != worked {
			t.Errorf("%s: %s", name, how)
		}
	}
}

// TestEscapes takes parts of the isolation away, as a host may that has not got them.
func TestEscapes(t *testing.T) {
	abi, err := LandlockABI()
	if err != nil {
		t.Log(err)
	}
	for name, off := range map[string]int{
		"with all": 0, "without Landlock": files, "without filter": calls, "without namespaces": namespaces,
		"with Landlock alone": calls | namespaces, "with the filter alone": files | namespaces, "with namespaces alone": files | calls,
	} {
		t.Run(name, func(t *testing.T) {
			p := newPrison(t)
			spec := p.spec(t)
			spec.Without = without(off)
			process, state, err := spec.Start(p.command(t))
			must(t, err)
			await(t, process)
			t.Logf("by %q, missing %q", state.By, state.Missing)
			if missing := len(state.Missing); missing < len(spec.Without) {
				t.Errorf("missing is %q", state.Missing)
			}
			had := have(state.By, abi)
			went := p.report(t)
			for _, a := range permitted() {
				if went[a.name] != worked {
					t.Errorf("%s: %s", a.name, went[a.name])
				}
			}
			for _, a := range attempts() {
				by := a.refusedBy & had
				if a.refusedBy&files != 0 && a.abi > abi {
					by &^= files
				}
				if how := went[a.name]; by != 0 && (how == worked || how == "") {
					t.Errorf("%s: it worked (%s)", a.name, how)
				}
			}
		})
	}
}

// have are the parts that are on.
func have(by []string, abi int) (parts int) {
	for part, begin := range map[int]Part{files: Files, calls: Calls, namespaces: Namespaces} {
		if slices.ContainsFunc(by, func(s string) bool { return strings.HasPrefix(s, string(begin)) }) {
			parts |= part
		}
	}
	if abi == 0 {
		parts &^= files
	}
	return parts
}

func TestOrdinaryUserIsIsolated(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("all tests run as an ordinary user already")
	}
	const nobody = 65534
	dir, err := os.MkdirTemp("/tmp", "hpu")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	self, err := os.Executable()
	must(t, err)
	program, err := os.ReadFile(self)
	must(t, err)
	own := filepath.Join(dir, "isolation.test")
	must(t, os.WriteFile(own, program, 0o700))
	for _, path := range []string{dir, own} {
		must(t, os.Chown(path, nobody, nobody))
	}
	cmd := exec.Command(own, "-test.run=^TestEscapes$|^TestAttemptsWork", "-test.v")
	cmd.Env, cmd.Dir = []string{"PATH=" + os.Getenv("PATH")}, dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	must(t, err)
	if !strings.Contains(string(out), "--- PASS: TestEscapes/with_all") {
		t.Error("nothing was tried")
	}
}

func TestOurThreadsStayFree(t *testing.T) {
	p := newPrison(t)
	for range 4 {
		process, _, err := p.spec(t).Start(p.command(t))
		must(t, err)
		await(t, process)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) { // threads end by themselves
		restricted := restrictedThreads(t)
		if len(restricted) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%q stay restricted", restricted)
		}
	}
	must(t, connect("unix", p.others("daemon.sock")))
}

func restrictedThreads(t *testing.T) (paths []string) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	must(t, err)
	for _, path := range tasks {
		if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), "NoNewPrivs:\t1") {
			paths = append(paths, path)
		}
	}
	return paths
}

func TestWhatIsNotThere(t *testing.T) {
	p := newPrison(t)
	spec := p.spec(t)
	spec.Write = append(spec.Write, p.own("nothing"))
	if _, _, err := spec.Start(p.command(t)); !errors.Is(err, os.ErrNotExist) {
		if _, aerr := LandlockABI(); aerr == nil {
			t.Errorf("a file to write to that is not there: %v", err)
		}
	}
	if _, _, err := p.spec(t).Start(func() *exec.Cmd { return exec.Command("/not/there") }); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a program that is not there: %v", err)
	}
}

func TestWrapper(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	if why, err := Wrapper(self); why != "" || err != nil {
		t.Errorf("a program is called %q, %v", why, err)
	}
	script := filepath.Join(t.TempDir(), "qemu")
	must(t, os.WriteFile(script, []byte("#!/bin/sh\nexec /bin/cat /etc/passwd >/dev/null\n"), 0o700))
	why, err := Wrapper(script)
	if why == "" || err != nil {
		t.Errorf("a script is called %q, %v", why, err)
	}
	process, state, err := Spec{Without: Without{Files: why, Namespaces: why}}.Start(func() *exec.Cmd { return exec.Command(script) })
	must(t, err)
	await(t, process)
	if len(state.Missing) != 2 {
		t.Errorf("of a script is missing %q", state.Missing)
	}
}

func BenchmarkStart(b *testing.B) {
	for name, spec := range map[string]*Spec{"free": nil, "isolated": {Execute: []string{"/"}, Write: []string{"/dev/null"}}} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				command := func() *exec.Cmd { return exec.Command("/bin/true") }
				if spec == nil {
					if err := command().Run(); err != nil {
						b.Fatal(err)
					}
					continue
				}
				process, _, err := spec.Start(command)
				if err == nil {
					_, err = process.Wait()
				}
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
