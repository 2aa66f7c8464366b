//go:build linux

package reach

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/argv"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
	"github.com/holdpoint/holdpoint/internal/qemu/isolation"
)

// prisonVariable makes the test's own program the one in QEMU's place: it tries
// what is in the variable, an attempt per line, and prints how each went.
const prisonVariable = "LC_HOLDPOINT_TEST_ATTEMPTS"

func TestMain(m *testing.M) {
	if attempts := os.Getenv(prisonVariable); attempts != "" {
		for line := range strings.Lines(attempts) {
			what, path, _ := strings.Cut(strings.TrimSpace(line), " ")
			fmt.Printf("%s %s %v\n", what, path, try(what, path) == nil)
		}
		return
	}
	os.Exit(m.Run())
}

func try(what, path string) error {
	var f *os.File
	var err error
	switch what {
	case "read":
		f, err = os.Open(path)
	case "write":
		f, err = os.OpenFile(path, os.O_RDWR, 0)
	case "rewrite": // through a descriptor that can only read
		var held *os.File
		if held, err = os.Open(path); err == nil {
			defer held.Close()
			f, err = os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", held.Fd()), os.O_RDWR, 0)
		}
	case "make":
		f, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	case "remove":
		return os.Remove(path)
	case "listen":
		l, err := net.Listen("unix", path)
		if err == nil {
			err = l.Close()
		}
		return err
	case "connect":
		c, err := net.Dial("unix", path)
		if err == nil {
			err = c.Close()
		}
		return err
	default:
		return errors.ErrUnsupported
	}
	if err == nil {
		err = f.Close()
	}
	return err
}

// home is a holdpoint home with two machines; "web" is the one that is taken over.
type home struct {
	dir string
	cfg machine.RunConfig
}

func newHome(t *testing.T) *home {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "hpr")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	h := &home{dir: dir}
	for _, name := range []string{"layers", "images", "cache/memory", "run/r/web", "run/r/db", "runs/web", "runs/db"} {
		must(t, os.MkdirAll(h.path(name), 0o700))
	}
	for _, name := range []string{
		"catalog.db", "layers/base.qcow2", "layers/top.qcow2", "layers/next.qcow2", "layers/merged.qcow2", "layers/theirs.qcow2",
		"images/root.img", "images/kernel", "images/initramfs", "cache/memory/k", "cache/memory/other",
		"runs/web/config.json", "runs/web/record.json", "runs/web/memory", "runs/web/console.log", "runs/web/events.in", "runs/web/events.out",
		"runs/db/config.json", "runs/db/memory", "runs/db/console.log",
	} {
		must(t, os.WriteFile(h.path(name), nil, 0o600))
	}
	for _, name := range []string{"run/daemon.sock", "run/r/web/monitor.sock", "run/r/db/qmp.sock"} {
		l, err := net.Listen("unix", h.path(name))
		must(t, err)
		t.Cleanup(func() { _ = l.Close() })
	}
	h.cfg = machine.RunConfig{
		RunID: "web", Dir: h.path("runs/web"), SocketDir: h.path("run/r/web"), Accelerator: "tcg",
		Kernel: h.path("images/kernel"), Initramfs: h.path("images/initramfs"),
		Disk: []machine.Layer{
			{ID: "image", Path: h.path("images/root.img"), Format: "raw"}, h.layer("base"), h.layer("top"),
		},
	}
	return h
}

func (h *home) path(name string) string { return filepath.Join(h.dir, name) }

func (h *home) layer(id string) machine.Layer {
	return machine.Layer{ID: id, Path: h.path("layers/" + id + ".qcow2"), Format: "qcow2"}
}

// try runs the attempts in QEMU's place, or free, and gives those that worked.
func (h *home) try(t *testing.T, spec *isolation.Spec, attempts []string) map[string]bool {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	lines := make([]string, len(attempts))
	for i, a := range attempts {
		what, name, _ := strings.Cut(a, " ")
		if !filepath.IsAbs(name) {
			name = h.path(name)
		}
		lines[i] = what + " " + name
	}
	out, err := os.CreateTemp(t.TempDir(), "out")
	must(t, err)
	defer out.Close()
	command := func() *exec.Cmd {
		cmd := exec.Command(self)
		cmd.Env = Environment([]string{prisonVariable + "=" + strings.Join(lines, "\n")})
		cmd.Stdout, cmd.Stderr = out, out
		return cmd
	}
	if spec == nil {
		must(t, command().Run())
	} else {
		process, by, err := spec.Start(command)
		must(t, err)
		t.Logf("isolated by %q, missing %q", by.By, by.Missing)
		st, err := process.Wait()
		must(t, err)
		if !st.Success() {
			t.Fatalf("the program ended with %s", st)
		}
	}
	text, err := os.ReadFile(out.Name())
	must(t, err)
	worked := map[string]bool{}
	for i, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		if i >= len(attempts) || !strings.HasPrefix(line, lines[i]) {
			t.Fatalf("it printed %q", text)
		}
		worked[attempts[i]] = strings.HasSuffix(line, " true")
	}
	return worked
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// prepare is Prepare for a QEMU that this program is.
func (h *home) prepare(t *testing.T, line string) (*Reach, machine.RunConfig, isolation.Spec) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	r, seen, spec, err := Prepare(host.Capabilities{Binary: self, Line: line}, h.cfg, nil)
	must(t, err)
	return r, seen, spec
}

func needsLandlock(t *testing.T) {
	t.Helper()
	if _, err := isolation.LandlockABI(); err != nil {
		t.Skip(err)
	}
}

// needed are what QEMU does with its files.
var needed = []string{
	"read images/root.img", "read images/kernel", "read images/initramfs", "read layers/base.qcow2", "write runs/web/own/l-top",
	"write runs/web/memory", "write runs/web/console.log", "write runs/web/events.in", "write runs/web/events.out",
	"make runs/web/own/qemu.pid", "remove runs/web/own/qemu.pid", "listen run/r/web/own/net.sock", "read /dev/urandom", "write /dev/null",
}

// escapes are what it has no business with.
var escapes = []string{
	"read /etc/passwd", "read catalog.db", "write catalog.db",
	"read runs/db/memory", "read runs/db/config.json", "write runs/db/console.log", "read cache/memory/other",
	"read layers/theirs.qcow2", "write layers/theirs.qcow2", "write layers/base.qcow2", "rewrite layers/base.qcow2", "write images/root.img",
	"read runs/web/config.json", "write runs/web/config.json", "write runs/web/record.json",
	"connect run/daemon.sock", "connect run/r/web/monitor.sock", "connect run/r/db/qmp.sock",
	"make layers/new", "make runs/web/new", "make runs/db/new", "listen run/r/web/new.sock",
	"remove run/r/web/monitor.sock", "remove runs/web/record.json", "remove layers/base.qcow2", "remove catalog.db",
}

func TestEscapesWorkOtherwise(t *testing.T) {
	h := newHome(t)
	h.prepare(t, "7.2")
	for attempt, worked := range h.try(t, nil, append(append([]string(nil), needed...), escapes...)) {
		if !worked {
			t.Errorf("%s does not work without isolation", attempt)
		}
	}
}

func TestOnlyItsOwn(t *testing.T) {
	needsLandlock(t)
	h := newHome(t)
	_, seen, spec := h.prepare(t, "7.2")
	if got := seen.Disk[2].Path; got != h.path("runs/web/own/l-top") {
		t.Errorf("the top is called %s", got)
	}
	worked := h.try(t, &spec, append(append([]string(nil), needed...), escapes...))
	for _, attempt := range needed {
		if !worked[attempt] {
			t.Errorf("%s was refused", attempt)
		}
	}
	for _, attempt := range escapes {
		if worked[attempt] {
			t.Errorf("%s worked", attempt)
		}
	}
}

// TestRightsGoWithTheNames takes files out of reach that QEMU was given.
func TestRightsGoWithTheNames(t *testing.T) {
	needsLandlock(t)
	h := newHome(t)
	h.cfg.Incoming = &machine.Incoming{MemoryFile: h.path("cache/memory/k"), DeviceState: h.path("catalog.db")}
	r, seen, spec := h.prepare(t, "7.2")
	memory := "write " + seen.Incoming.MemoryFile
	if worked := h.try(t, &spec, []string{memory, "write runs/web/own/l-top"}); !worked[memory] {
		t.Errorf("a QEMU that opens its memory only for writing was refused: %v", worked)
	}
	_, err := r.Writable(h.layer("next"))
	must(t, err)
	_, err = r.ReadOnly(h.layer("merged"))
	must(t, err)
	for attempt, ok := range h.try(t, &spec, []string{"write runs/web/own/l-next", "read runs/web/below/l-merged"}) {
		if !ok {
			t.Errorf("%s was refused", attempt)
		}
	}
	r.Keep("next")
	for attempt, ok := range h.try(t, &spec, []string{
		memory, "read cache/memory/k", "write runs/web/own/l-top", "write layers/top.qcow2", "write runs/web/below/l-merged", "make runs/web/below/new",
	}) {
		if ok {
			t.Errorf("%s worked", attempt)
		}
	}
	r.Forget("merged")
	r.Clear()
	for _, folder := range []string{argv.Own, below} {
		if left, err := os.ReadDir(filepath.Join(h.cfg.Dir, folder)); err != nil || len(left) > 0 {
			t.Errorf("in %s is left %v, %v", folder, left, err)
		}
	}
}

func TestNewerQEMUOnlyReadsItsMemory(t *testing.T) {
	needsLandlock(t)
	h := newHome(t)
	h.cfg.Incoming = &machine.Incoming{MemoryFile: h.path("cache/memory/k"), DeviceState: h.path("catalog.db")}
	_, _, spec := h.prepare(t, "8.2")
	worked := h.try(t, &spec, []string{"read cache/memory/k", "write cache/memory/k", "rewrite cache/memory/k"})
	if !worked["read cache/memory/k"] || worked["write cache/memory/k"] || worked["rewrite cache/memory/k"] {
		t.Errorf("of its memory file worked %v", worked)
	}
}

// TestFilesWithoutSecondNames is a host whose file system has no hard links: as
// one does that refuses a link to what is not there.
func TestFilesWithoutSecondNames(t *testing.T) {
	h := newHome(t)
	h.cfg.Disk[2].Path = h.path("layers/missing.qcow2")
	r, seen, spec := h.prepare(t, "7.2")
	if seen.Disk[2].Path != h.cfg.Disk[2].Path || spec.Without[isolation.Files] == "" {
		t.Errorf("the disk is %+v, without %q", seen.Disk, spec.Without)
	}
	must(t, r.Began(machine.Isolation{Missing: []string{"files: none"}}))
	for _, r := range []*Reach{r, Open(h.cfg.Dir)} {
		if l, err := r.Writable(h.layer("next")); err != nil || l != h.layer("next") {
			t.Errorf("the next layer is %+v, %v", l, err)
		}
		if by := r.Isolation(); len(by.Missing) != 1 {
			t.Errorf("isolation is %+v", by)
		}
	}
	r.Remove()
	if by := Open(h.cfg.Dir).Isolation(); len(by.Missing) != 1 || !strings.HasPrefix(by.Missing[0], "all: ") {
		t.Errorf("of a run that nothing is known of isolation is %+v", by)
	}
}

func TestNamesAreThoseOfNodes(t *testing.T) {
	h := newHome(t)
	r, _, _ := h.prepare(t, "7.2")
	strange := h.layer("next")
	strange.ID = "../../catalog.db"
	l, err := r.ReadOnly(strange)
	must(t, err)
	if filepath.Dir(l.Path) != h.path("runs/web/below") || filepath.Base(l.Path) != disk.NodeName(strange.ID) {
		t.Errorf("a strange id makes %s", l.Path)
	}
}
