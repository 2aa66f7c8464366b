//go:build linux

package cgroup_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/cgroup"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// fake makes a hierarchy of ordinary files, as the kernel would show it.
func fake(t *testing.T, self, controllers string) (*cgroup.Tree, string) {
	t.Helper()
	dir := t.TempDir()
	root := filepath.Join(dir, "mount", "user.slice", "holdpoint.service")
	put(t, filepath.Join(root, "cgroup.controllers"), controllers)
	for _, name := range []string{"cgroup.procs", "cgroup.subtree_control"} {
		put(t, filepath.Join(root, name), "")
	}
	put(t, filepath.Join(dir, "self"), self)
	return &cgroup.Tree{Mount: filepath.Join(dir, "mount"), Self: filepath.Join(dir, "self")}, root
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func holds(t *testing.T, path, want string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("%s: %q, %v, want %q", path, got, err, want)
	}
}

const delegated = "1:name=systemd:/x\n0::/user.slice/holdpoint.service\n"

// Groups are made below the given one, from which all processes go first.
func TestGroup(t *testing.T) {
	tree, root := fake(t, delegated, "cpuset cpu io memory pids\n")
	put(t, filepath.Join(root, "cgroup.procs"), "4711\n")
	// The kernel makes the files of a new group; here they are there before.
	put(t, filepath.Join(root, "holdpoint", "cgroup.procs"), "")
	for _, group := range []string{"a", "b"} {
		for _, file := range []string{"cgroup.procs", "cpu.max", "memory.max"} {
			put(t, filepath.Join(root, "limited-"+group, file), "")
		}
	}
	if err := tree.Check(); err != nil {
		t.Fatal(err)
	}
	holds(t, filepath.Join(root, "cgroup.subtree_control"), "")
	dir, err := tree.Group("a", cgroup.Limits{CPUMillis: 1500, MemoryBytes: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	holds(t, filepath.Join(root, "holdpoint", "cgroup.procs"), "4711")
	holds(t, filepath.Join(root, "cgroup.subtree_control"), "+cpu +memory")
	holds(t, filepath.Join(dir, "cpu.max"), "150000 100000")
	holds(t, filepath.Join(dir, "memory.max"), "1073741824")
	if dir, err = tree.Group("b", cgroup.Limits{CPUMillis: 10}); err != nil {
		t.Fatal(err)
	}
	holds(t, filepath.Join(dir, "cpu.max"), "1000 100000")
	holds(t, filepath.Join(dir, "memory.max"), "max")
	if err := cgroup.Put(dir, 4712); err != nil {
		t.Fatal(err)
	}
	holds(t, filepath.Join(dir, "cgroup.procs"), "4712")
}

// A daemon that was started out of the group that an earlier one made is given
// what that one was.
func TestStartedInside(t *testing.T) {
	tree, root := fake(t, "0::/user.slice/holdpoint.service/holdpoint\n", "cpu memory\n")
	if err := os.MkdirAll(filepath.Join(root, "limited-old"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := tree.Check(); err != nil {
		t.Error(err)
	}
	tree.Sweep()
	if _, err := os.Stat(filepath.Join(root, "limited-old")); err != nil {
		t.Errorf("a group that is about to be used: %v", err)
	}
	then := time.Now().Add(-time.Hour)
	if err := os.Chtimes(filepath.Join(root, "limited-old"), then, then); err != nil {
		t.Fatal(err)
	}
	tree.Sweep()
	if _, err := os.Stat(filepath.Join(root, "limited-old")); !os.IsNotExist(err) {
		t.Errorf("an empty group stays: %v", err)
	}
}

func TestUnsupported(t *testing.T) {
	for name, test := range map[string]struct{ self, controllers, want string }{
		"first version only": {"4:memory:/x\n", "cpu memory", "the kernel has no cgroup v2"},
		"elsewhere":          {"0::/\n", "cpu memory", "is not mounted at"},
		"no controller":      {delegated, "hugetlb cpu", `has no controller "memory"`},
	} {
		tree, _ := fake(t, test.self, test.controllers)
		if err := tree.Check(); !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "systemctl") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := tree.Group("a", cgroup.Limits{}); !errdefs.Is(err, errdefs.Unsupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	tree, root := fake(t, delegated, "cpu memory")
	if err := os.Remove(filepath.Join(root, "cgroup.subtree_control")); err != nil {
		t.Fatal(err)
	}
	if err := tree.Check(); !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "was not given to holdpoint") {
		t.Errorf("not delegated: %v", err)
	}
}
