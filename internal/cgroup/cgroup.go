//go:build linux

// Package cgroup holds processes to limits of CPU time and memory by groups of
// the kernel's second hierarchy (Documentation/admin-guide/cgroup-v2.rst), below
// the group that this process was given. It knows nothing of machines.
package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const (
	// ours is the group that takes the processes which were in the given one: a
	// group with processes in it cannot hand out limits to groups below it.
	ours = "holdpoint"
	// prefix begins the names of the groups that have limits.
	prefix = "limited-"
	// period is how long the CPU time of a limit is counted, in microseconds.
	period = 100_000
)

// Advice is what a host without usable groups is told.
const Advice = "boot the host with cgroup v2 (systemd.unified_cgroup_hierarchy=1) and start the daemon by its systemd unit: systemctl --user start holdpoint, or as root systemctl start holdpoint"

// Limits are what the processes of one group may use together; 0 is no limit.
type Limits struct {
	// CPUMillis is in thousandths of a CPU.
	CPUMillis int
	// MemoryBytes counts files that they have written and that can be dropped, too.
	MemoryBytes int64
}

// Tree is the groups below the one that this process was given.
type Tree struct {
	// Mount is where the hierarchy is, Self the file that says which group this
	// process is in.
	Mount, Self string

	mu    sync.Mutex
	root  string
	ready bool
}

// New returns the Tree of this host. Nothing is looked at or changed yet.
func New() *Tree { return &Tree{Mount: "/sys/fs/cgroup", Self: "/proc/self/cgroup"} }

// Check is nil if groups can be made; else UNSUPPORTED, with the reason. It
// changes nothing.
func (t *Tree) Check() error {
	_, err := t.find()
	return err
}

// find gives the group that this process was given.
func (t *Tree) find() (string, error) {
	refuse := func(format string, args ...any) (string, error) {
		return "", errdefs.New(errdefs.Unsupported, "limits of CPU and memory: %w; %s", fmt.Errorf(format, args...), Advice)
	}
	text, err := os.ReadFile(t.Self)
	if err != nil {
		return refuse("what group holdpoint is in is not known: %w", err)
	}
	i := slices.IndexFunc(strings.Split(string(text), "\n"), func(line string) bool { return strings.HasPrefix(line, "0::/") })
	if i < 0 {
		return refuse("the kernel has no cgroup v2")
	}
	path := strings.TrimPrefix(strings.Split(string(text), "\n")[i], "0::")
	if filepath.Base(path) == ours { // an earlier daemon has gone there, and this one was started by it
		path = filepath.Dir(path)
	}
	root := filepath.Join(t.Mount, path)
	has, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	if err != nil {
		return refuse("cgroup v2 is not mounted at %s", t.Mount)
	}
	for _, want := range []string{"cpu", "memory"} {
		if !slices.Contains(strings.Fields(string(has)), want) {
			return refuse("the group %s has no controller %q", path, want)
		}
	}
	control, err := os.OpenFile(filepath.Join(root, "cgroup.subtree_control"), os.O_WRONLY, 0)
	if err != nil {
		return refuse("the group %s was not given to holdpoint: %w", path, err)
	}
	return root, control.Close()
}

// Group makes a group of that name, or finds it, and gives its folder.
func (t *Tree) Group(name string, l Limits) (string, error) {
	if err := t.prepare(); err != nil {
		return "", err
	}
	dir := filepath.Join(t.root, prefix+name)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("make group %q: %w", dir, err)
	}
	cpu, memory := "max", "max"
	if l.CPUMillis > 0 {
		cpu = strconv.Itoa(l.CPUMillis * period / 1000)
	}
	if l.MemoryBytes > 0 {
		memory = strconv.FormatInt(l.MemoryBytes, 10)
	}
	return dir, errors.Join(write(dir, "cpu.max", fmt.Sprintf("%s %d", cpu, period)), write(dir, "memory.max", memory))
}

// prepare makes the given group one that hands out limits, once.
func (t *Tree) prepare() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ready {
		return nil
	}
	root, err := t.find()
	if err != nil {
		return err
	}
	leaf := filepath.Join(root, ours)
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make group %q: %w", leaf, err)
	}
	inside, err := os.ReadFile(filepath.Join(root, "cgroup.procs"))
	if err != nil {
		return fmt.Errorf("list the processes of group %q: %w", root, err)
	}
	for _, pid := range strings.Fields(string(inside)) {
		if err := write(leaf, "cgroup.procs", pid); err != nil && isThere(pid) {
			return err
		}
	}
	if err := write(root, "cgroup.subtree_control", "+cpu +memory"); err != nil {
		return err
	}
	t.root, t.ready = root, true
	return nil
}

func isThere(pid string) bool {
	_, err := os.Stat("/proc/" + pid)
	return err == nil
}

// Put moves a process into a group.
func Put(dir string, pid int64) error { return write(dir, "cgroup.procs", strconv.FormatInt(pid, 10)) }

// young is for how long an empty group is left for those who are about to use it.
const young = time.Minute

// Sweep removes the groups in which nothing is left, but for new ones.
func (t *Tree) Sweep() {
	root, err := t.find()
	if err != nil {
		return
	}
	dirs, _ := filepath.Glob(filepath.Join(root, prefix+"*")) // the pattern is right
	for _, dir := range dirs {
		if info, err := os.Stat(dir); err == nil && time.Since(info.ModTime()) > young {
			_ = os.Remove(dir) // the kernel keeps one that is in use
		}
	}
}

func write(dir, file, text string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("set %s of group %q: %w", file, dir, err)
	}
	return nil
}
