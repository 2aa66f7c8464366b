package archtest

import (
	"strconv"
	"strings"
	"testing"
)

// levels is the reading order: a package imports from lower levels only, or
// along an edge of sameLevel. A folder covers what is below it.
var levels = map[string]int{
	// 0: words.
	"api":                 0,
	"internal/errdefs":    0,
	"internal/checkpoint": 0,
	"internal/durable":    0,
	"internal/undo":       0,
	"internal/home":       0,
	"internal/shellwords": 0,
	// 1: mechanisms, each on its own.
	"internal/wire":      1,
	"internal/qmp":       1,
	"internal/disk":      1,
	"internal/link":      1,
	"internal/tarstream": 1,
	"internal/agent":     1,
	"internal/dirty":     1,
	"internal/network":   1,
	"internal/store":     1,
	"internal/sparse":    1,
	"internal/oci":       1,
	"internal/accesslog": 1,
	"internal/cgroup":    1,
	"internal/netlink":   1,
	// 2: the machine.
	"internal/machine": 2,
	"internal/qemu":    2,
	"internal/window":  2,
	"client":           2,
	// 3: the story.
	"internal/monitor":   3,
	"internal/image":     3,
	"internal/capture":   3,
	"internal/catalog":   3,
	"internal/restore":   3,
	"internal/memory":    3,
	"internal/diskchain": 3,
	// 4: where it meets.
	"internal/daemon": 4,
	// 5: doors.
	"internal/gate": 5,
	// 6: the hand, and the assembly of the processes behind it.
	"internal/cli":   6,
	"internal/serve": 6,
	// 7: the binaries and what measures and tests them.
	"cmd":               7,
	"bench":             7,
	"test":              7,
	"internal/archtest": 7,
}

// sameLevel are the edges allowed within a level, with the reason of each.
var sameLevel = map[[2]string]string{
	{"internal/home", "internal/errdefs"}:       "an unusable home is an error with a kind",
	{"internal/home", "internal/durable"}:       "a home's folders are made private and durable",
	{"internal/checkpoint", "internal/errdefs"}: "an unknown kind of checkpoint is an error with a kind",
	{"internal/durable", "internal/errdefs"}:    "a full disk is an error with a kind",
	{"internal/durable", "internal/undo"}:       "a file is written in steps",
	{"internal/agent", "internal/link"}:         "the agent serves conversations of the link",
	{"internal/agent", "internal/tarstream"}:    "the agent packs and unpacks for cp",
	{"internal/agent", "internal/wire"}:         "the agent's errors keep their kinds",
	{"internal/agent", "internal/netlink"}:      "the guest's network is set by netlink, and its sockets are ended by it",
	{"internal/network", "internal/netlink"}:    "the host's routes are asked for by netlink",
	{"internal/qemu", "internal/machine"}:       "qemu implements machine.Hypervisor",
	{"internal/diskchain", "internal/catalog"}:  "a chain is what the catalog recorded",
	{"internal/window", "internal/machine"}:     "a window is opened on a machine's run",
	{"internal/capture", "internal/catalog"}:    "a capture ends with its publication in the catalog",
	{"internal/memory", "internal/catalog"}:     "memory files are made of the layers that the catalog names",
	{"internal/capture", "internal/memory"}:     "a capture drops what is the same in the memory below",
	{"internal/restore", "internal/memory"}:     "a run continues from a memory file",
	{"internal/restore", "internal/catalog"}:    "a restore is committed in the catalog",
	{"internal/restore", "internal/capture"}:    "what a restore discards is captured first",
}

// forbidden are edges that the levels would allow, with the reason against
// each. "from" and "to" are folders (or, for "to", import paths of others).
var forbidden = []struct{ from, to, reason string }{
	{"cmd/holdpoint-agent", "internal/home", "the guest has no home of the host"},
	{"cmd/holdpoint-agent", "internal/catalog", "the guest never reaches the host's records"},
	{"cmd/holdpoint-agent", "internal/daemon", "the guest never carries the host's policy"},
	{"cmd/holdpoint-agent", "internal/machine", "the guest does not know what runs it"},
	{"internal/agent", "internal/home", "the guest has no home of the host"},
	{"internal/monitor", "internal/qemu", "a monitor is given a machine.Hypervisor, so that the fake one passes the same tests"},
	{"internal/monitor", "internal/catalog", "a monitor has no database: it outlives the daemon that owns it"},
	{"internal/daemon", "internal/qemu", "the daemon reaches machines through their monitors only"},
	{"internal/daemon", "internal/qmp", "the daemon reaches machines through their monitors only"},
	{"internal/gate", "internal/catalog", "a gate can do nothing that the API cannot"},
	{"internal/gate", "internal/monitor", "a gate passes the daemon's admission, never around it"},
	{"internal/cli", "internal/catalog", "the command line asks the daemon"},
	{"internal/cli", "internal/monitor", "the command line asks the daemon"},
	{"client", "internal/machine", "the public client carries words of the API only"},
}

// onlyIn are packages of others with the one place that may import them.
var onlyIn = []struct{ pkg, in, reason string }{
	{"database/sql", "internal/catalog", "the catalog is the only database"},
	{"modernc.org/sqlite", "internal/catalog", "the catalog is the only database"},
	{"github.com/spf13/cobra", "internal/cli", "verbs are the command line's alone"},
	{"github.com/creack/pty", "internal/agent", "pseudo terminals are made in the guest"},
}

// under reports whether dir is the folder or below it.
func under(dir, folder string) bool {
	return dir == folder || strings.HasPrefix(dir, folder+"/")
}

// testSupport reports whether dir is only ever linked into tests.
func testSupport(dir string) bool { return strings.HasSuffix(dir, "test") || under(dir, "test") }

// place finds the entry of levels that covers dir.
func place(dir string) (folder string, level int, ok bool) {
	for f, l := range levels {
		if under(dir, f) && len(f) > len(folder) {
			folder, level, ok = f, l, true
		}
	}
	return folder, level, ok
}

// edges calls visit for each import of non-test code; to is relative to the
// module's root for our own packages.
func edges(t *testing.T, visit func(f file, to string, own bool)) {
	for _, f := range source(t) {
		if f.test {
			continue
		}
		for _, spec := range f.ast.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			own := path == module || strings.HasPrefix(path, module+"/")
			visit(f, strings.TrimPrefix(path, module+"/"), own)
		}
	}
}

func TestImportsGoDown(t *testing.T) {
	edges(t, func(f file, to string, own bool) {
		if !own {
			return
		}
		fromFolder, fromLevel, ok := place(f.dir)
		if !ok {
			t.Errorf("%s: folder %s has no level: give it one in levels", f.path, f.dir)
			return
		}
		toFolder, toLevel, ok := place(to)
		switch {
		case !ok:
			t.Errorf("%s: imports %s, which has no level: give it one in levels", f.path, to)
		case fromFolder == toFolder || toLevel < fromLevel:
		case toLevel > fromLevel:
			t.Errorf("%s (level %d) imports %s (level %d): what is below must not know what is above; declare an interface where it is used",
				f.path, fromLevel, to, toLevel)
		case sameLevel[[2]string{fromFolder, toFolder}] == "":
			t.Errorf("%s imports %s of its own level %d: name the edge and its reason in sameLevel, or turn it into an interface", f.path, to, fromLevel)
		}
	})
}

func TestForbiddenEdges(t *testing.T) {
	edges(t, func(f file, to string, own bool) {
		if !own {
			return
		}
		for _, e := range forbidden {
			if under(f.dir, e.from) && under(to, e.to) {
				t.Errorf("%s imports %s: %s", f.path, to, e.reason)
			}
		}
	})
}

func TestForeignPackagesHaveTheirPlace(t *testing.T) {
	edges(t, func(f file, to string, own bool) {
		for _, o := range onlyIn {
			if !own && under(to, o.pkg) && !under(f.dir, o.in) && !testSupport(f.dir) {
				t.Errorf("%s imports %s, which only %s may: %s", f.path, to, o.in, o.reason)
			}
		}
		if !own && under(to, "testing") && !testSupport(f.dir) {
			t.Errorf("%s imports %s: what runs does not carry the test framework", f.path, to)
		}
	})
}

// TestClosures: what a small binary or the public package reaches, through
// any number of imports, stays small.
func TestClosures(t *testing.T) {
	imports := make(map[string]map[string]bool)
	edges(t, func(f file, to string, own bool) {
		if !own {
			to = "foreign:" + to
		}
		if imports[f.dir] == nil {
			imports[f.dir] = make(map[string]bool)
		}
		imports[f.dir][to] = true
	})
	var reach func(dir string, seen map[string]bool)
	reach = func(dir string, seen map[string]bool) {
		for to := range imports[dir] {
			if !seen[to] {
				seen[to] = true
				reach(to, seen)
			}
		}
	}
	for _, c := range []struct{ from, not, reason string }{
		{"cmd/holdpoint-agent", "foreign:database/sql", "the guest agent is small and starts at every boot"},
		{"cmd/holdpoint-agent", "foreign:github.com/spf13/cobra", "the guest agent is small and starts at every boot"},
		{"client", "foreign:database/sql", "a program that links the client does not link the daemon"},
		{"client", "internal/daemon", "a program that links the client does not link the daemon"},
		{"internal/cli", "internal/catalog", "the daemon is handed to the command line by the binary, so that it also builds without it"},
	} {
		seen := make(map[string]bool)
		reach(c.from, seen)
		if seen[c.not] {
			t.Errorf("%s reaches %s: %s", c.from, c.not, c.reason)
		}
	}
}

func TestTheTablesNameFoldersThatExist(t *testing.T) {
	dirs := make(map[string]bool)
	for _, f := range source(t) {
		for dir := f.dir; dir != "."; dir = parent(dir) {
			dirs[dir] = true
		}
	}
	for folder := range levels {
		if !dirs[folder] {
			t.Errorf("levels names %s, which does not exist", folder)
		}
	}
	for edge := range sameLevel {
		if _, ok := levels[edge[0]]; !ok {
			t.Errorf("sameLevel names %s, which has no level", edge[0])
		}
		if _, ok := levels[edge[1]]; !ok {
			t.Errorf("sameLevel names %s, which has no level", edge[1])
		}
	}
}

func parent(dir string) string {
	i := strings.LastIndexByte(dir, '/')
	if i < 0 {
		return "."
	}
	return dir[:i]
}
