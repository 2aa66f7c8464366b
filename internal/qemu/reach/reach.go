//go:build linux

// Package reach says which of the host's files the QEMU of one run may reach,
// under which names, and gives it those that come while it runs. It starts
// nothing.
//
// What Landlock allows is settled when QEMU starts, and the folder of all
// layers is not one that it may write to. So a run has two folders: what is in
// "own" QEMU may read and write, what is in "below" it may read. A file of the
// disk gets a second name (a hard link) in one of them, by which QEMU opens it,
// and with the name goes the right to open it.
package reach

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/argv"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
	"github.com/holdpoint/holdpoint/internal/qemu/isolation"
)

// The names in a run's folder. The last one is the memory file of a checkpoint,
// in own, for a QEMU that opens it only for writing.
const (
	below     = "below"
	stateFile = "isolation.json"
	memory    = "memory"
)

// Reach is what one run's QEMU may reach. Its life: Prepare, before the start;
// Began, with what the start said; Writable, ReadOnly, Keep and Forget while
// the disk changes, also of a successor, after Open; Clear, after the end. Remove undoes it all.
type Reach struct {
	dir, socketDir string
	state          state
}

// state is isolation.json in the run's folder, where QEMU cannot write.
type state struct {
	machine.Isolation
	// Plain is set where files cannot have second names: they are opened by
	// their own.
	Plain bool `json:"plain,omitempty"`
	// Memory is by which name QEMU maps its memory file.
	Memory string `json:"memory"`
}

// Prepare makes the run's folders. It returns the config as QEMU is to see it
// and what it may reach. without are parts that are turned off.
func Prepare(caps host.Capabilities, cfg machine.RunConfig, without isolation.Without) (r *Reach, seen machine.RunConfig, spec isolation.Spec, err error) {
	r = &Reach{dir: cfg.Dir, socketDir: cfg.SocketDir, state: state{Memory: argv.MemoryFile(cfg)}}
	r.Clear()
	for _, dir := range []string{r.path(argv.Own), r.path(below), filepath.Join(cfg.SocketDir, argv.Own)} {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, cfg, spec, err
		}
	}
	spec.Without = isolation.Without{}
	for part, why := range without {
		spec.Without[part] = why
	}
	why, err := isolation.Wrapper(caps.Binary)
	if err != nil {
		return nil, cfg, spec, err
	}
	if why != "" {
		spec.Without[isolation.Files], spec.Without[isolation.Namespaces] = why, why
	}
	seen = cfg
	if err := r.name(caps, &seen); err != nil {
		r.Clear()
		r.state.Plain, r.state.Memory = true, argv.MemoryFile(cfg)
		spec.Without[isolation.Files] = fmt.Sprintf("its disk cannot be given to it alone (%v)", err)
		seen = cfg
	}
	r.fill(&spec, caps, seen)
	return r, seen, spec, nil
}

// name gives the files that QEMU opens for writing names of their own.
func (r *Reach) name(caps host.Capabilities, cfg *machine.RunConfig) error {
	cfg.Disk = slices.Clone(cfg.Disk)
	top := &cfg.Disk[len(cfg.Disk)-1]
	named, err := r.Writable(*top)
	if err != nil {
		return err
	}
	*top = named
	if cfg.Incoming == nil || argv.OpensReadOnly(caps) {
		return nil
	}
	in := *cfg.Incoming
	r.state.Memory = filepath.Join(r.path(argv.Own), memory)
	if err := os.Link(in.MemoryFile, r.state.Memory); err != nil {
		return err
	}
	in.MemoryFile = r.state.Memory
	cfg.Incoming = &in
	return nil
}

// fill says what QEMU may reach: its program, libraries and firmware; the
// files that it starts with; and what comes into the folders.
func (r *Reach) fill(spec *isolation.Spec, caps host.Capabilities, seen machine.RunConfig) {
	spec.Execute, spec.Read = caps.Program()
	spec.Read = append(spec.Read, "/dev/urandom", r.path(below))
	for _, l := range seen.Disk[:len(seen.Disk)-1] {
		spec.Read = append(spec.Read, l.Path)
	}
	spec.Write = []string{"/dev/null", r.path(argv.Console), r.path(argv.EventsIn), r.path(argv.EventsOut)}
	if seen.Accelerator == "kvm" {
		spec.Write = append(spec.Write, "/dev/kvm")
	}
	if in := seen.Incoming; in == nil {
		spec.Write = append(spec.Write, r.path(argv.Memory))
		for _, path := range []string{seen.Kernel, seen.Initramfs} {
			if path != "" {
				spec.Read = append(spec.Read, path)
			}
		}
	} else if r.state.Memory == in.MemoryFile && filepath.Dir(in.MemoryFile) != r.path(argv.Own) {
		spec.Read = append(spec.Read, in.MemoryFile)
	}
	spec.Folders = []string{r.path(argv.Own), filepath.Join(seen.SocketDir, argv.Own)}
}

// Open is what the run may reach that another process has begun.
func Open(dir string) *Reach {
	r := &Reach{dir: dir}
	b, err := os.ReadFile(r.path(stateFile))
	if err == nil {
		err = json.Unmarshal(b, &r.state)
	}
	if err != nil {
		r.state = state{Plain: true, Isolation: machine.Isolation{Missing: []string{"all: nothing tells how this run was begun"}}}
	}
	return r
}

// Began keeps what the start said, for successors.
func (r *Reach) Began(by machine.Isolation) error {
	r.state.Isolation = by
	b, err := json.Marshal(r.state)
	if err == nil {
		err = os.WriteFile(r.path(stateFile), b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("keep what isolates the run: %w", err)
	}
	return nil
}

// Isolation is what the run is isolated by.
func (r *Reach) Isolation() machine.Isolation { return r.state.Isolation }

// Memory is by which name QEMU maps its memory file; empty for that of the config.
func (r *Reach) Memory() string { return r.state.Memory }

// Writable gives QEMU the layer to write to, and returns it by QEMU's name.
func (r *Reach) Writable(l machine.Layer) (machine.Layer, error) { return r.link(argv.Own, l) }

// ReadOnly gives QEMU the layer to read, and returns it by QEMU's name.
func (r *Reach) ReadOnly(l machine.Layer) (machine.Layer, error) { return r.link(below, l) }

func (r *Reach) link(folder string, l machine.Layer) (machine.Layer, error) {
	if r.state.Plain {
		return l, nil
	}
	path := filepath.Join(r.path(folder), disk.NodeName(l.ID))
	_ = os.Remove(path) // left by a change that failed
	if err := os.Link(l.Path, path); err != nil {
		return l, fmt.Errorf("give layer %s to QEMU: %w", l.ID, err)
	}
	l.Path = path
	return l, nil
}

// Keep takes all that QEMU can write to by a name out of its reach, but for the
// layer, its pid file and its socket. What it has open it keeps.
func (r *Reach) Keep(topID string) {
	r.empty(argv.Own, disk.NodeName(topID), filepath.Base(argv.PIDFile), filepath.Base(argv.Network))
}

// Forget takes a layer out of QEMU's reach altogether.
func (r *Reach) Forget(id string) {
	for _, folder := range []string{argv.Own, below} {
		_ = os.Remove(filepath.Join(r.path(folder), disk.NodeName(id))) // there may be none
	}
}

// Clear lets go of all files. What else QEMU has made in its folder goes too,
// but for its pid file, the trace of an end that was not its own.
func (r *Reach) Clear() {
	r.empty(argv.Own, filepath.Base(argv.PIDFile))
	r.empty(below)
}

func (r *Reach) empty(folder string, but ...string) {
	entries, _ := os.ReadDir(r.path(folder)) // none where there is no folder
	for _, e := range entries {
		if !slices.Contains(but, e.Name()) {
			_ = os.Remove(filepath.Join(r.path(folder), e.Name())) // tried again, and goes with the run's folder
		}
	}
}

// Environment is what of ours QEMU gets to see: what its loader and its words
// depend on, and our marks of whose process it is.
func Environment(all []string) (env []string) {
	for _, kv := range all {
		key, _, _ := strings.Cut(kv, "=")
		switch {
		case key == "PATH", key == "LANG", key == "TZ", strings.HasPrefix(key, "LC_"), strings.HasPrefix(key, "LD_"), strings.HasPrefix(key, "QEMU_"), strings.HasPrefix(key, "HOLDPOINT_RUN"):
			env = append(env, kv)
		}
	}
	return env
}

// Remove undoes Prepare, for a QEMU that did not start.
func (r *Reach) Remove() {
	for _, path := range []string{r.path(argv.Own), r.path(below), r.path(stateFile), filepath.Join(r.socketDir, argv.Own)} {
		_ = os.RemoveAll(path) // goes with the run's folders
	}
}

func (r *Reach) path(name string) string { return filepath.Join(r.dir, name) }
