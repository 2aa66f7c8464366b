//go:build linux

package qemu

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/argv"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
	"github.com/holdpoint/holdpoint/internal/qemu/logs"
	"github.com/holdpoint/holdpoint/internal/qemu/process"
	"github.com/holdpoint/holdpoint/internal/qemu/reach"
	"github.com/holdpoint/holdpoint/internal/qmp"
)

// checkIncoming refuses files that cannot be what a window kept. A link is
// refused because the mapping is found again by the file's own path.
func checkIncoming(cfg machine.RunConfig) error {
	in := cfg.Incoming
	if in == nil {
		return nil
	}
	for what, path := range map[string]string{"memory file": in.MemoryFile, "device state": in.DeviceState} {
		st, err := os.Lstat(path)
		switch {
		case errors.Is(err, os.ErrNotExist):
			return errdefs.New(errdefs.NotFound, "launch run %q: find %s: %w", cfg.RunID, what, err)
		case err != nil:
			return errdefs.New(errdefs.Storage, "launch run %q: find %s: %w", cfg.RunID, what, err)
		case !filepath.IsAbs(path):
			return errdefs.New(errdefs.Invalid, "launch run %q: %s %q is not absolute", cfg.RunID, what, path)
		case !st.Mode().IsRegular():
			return errdefs.New(errdefs.Storage, "launch run %q: %s %q is no regular file", cfg.RunID, what, path)
		case what == "memory file" && st.Size() != cfg.MemoryBytes:
			return errdefs.New(errdefs.Storage, "launch run %q: memory file %q has %d bytes, not the %d of the machine",
				cfg.RunID, path, st.Size(), cfg.MemoryBytes)
		}
	}
	return nil
}

// ready sets up the fresh process, whose guest has not executed anything.
func (q *QEMU) ready(ctx context.Context, caps host.Capabilities, cfg machine.RunConfig, within *reach.Reach, p *process.Process, client *qmp.Client) error {
	if err := q.protect(ctx, caps, cfg, within, p); err != nil {
		return err
	}
	within.Keep(cfg.Disk[len(cfg.Disk)-1].ID)
	if cfg.Incoming == nil {
		return nil
	}
	return load(ctx, cfg, client)
}

// protect takes the process's write access to its memory file away, and lets
// a successor of ours trace it. A run that boots is the only one to map its
// file and goes on without; one that continues shares its with others, and
// there a failure is UNSUPPORTED.
func (q *QEMU) protect(ctx context.Context, caps host.Capabilities, cfg machine.RunConfig, within *reach.Reach, p *process.Process) error {
	err := process.LetSuccessorsTrace(ctx, yamaScope, p.ID().PID)
	if err != nil {
		q.log.WarnContext(ctx, "full checkpoints will end with this process", "run", cfg.RunID, "error", err)
	}
	if argv.OpensReadOnly(caps) {
		return nil
	}
	memory := memoryOf(cfg, within, p.ID().PID)
	if cfg.Incoming != nil {
		memory.Spare = argv.MemoryFD
	}
	_, err = dirty.ReadOnly(ctx, memory)
	if err == nil || ctx.Err() != nil && cfg.Incoming == nil {
		return nil
	}
	if cfg.Incoming == nil {
		q.log.WarnContext(ctx, "QEMU keeps write access to its memory file", "run", cfg.RunID, "error", err)
		return nil
	}
	if errdefs.Is(err, errdefs.WrongState) || ctx.Err() != nil { // it ended, and what it printed says why
		return err
	}
	return errdefs.New(errdefs.Unsupported,
		"QEMU %s keeps write access to the memory that others map, and this host does not let it be taken away: %w; allow ptrace (see holdpoint doctor) or use QEMU 8.2 or newer",
		caps.Version, err)
}

// memoryOf says where the guest's memory of a run is.
func memoryOf(cfg machine.RunConfig, within *reach.Reach, pid int) dirty.Config {
	return dirty.Config{PID: pid, MemoryFile: cmp.Or(within.Memory(), argv.MemoryFile(cfg)), MemoryBytes: cfg.MemoryBytes}
}

// load gives the process the state of CPUs and devices and returns when it is
// in place, the disk is open for writing, and the vCPUs stand still.
func load(ctx context.Context, cfg machine.RunConfig, client *qmp.Client) error {
	f, err := os.OpenFile(cfg.Incoming.DeviceState, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return errdefs.New(errdefs.Storage, "open device state: %w", err)
	}
	defer f.Close() // QEMU has a duplicate
	events := qmp.NewSubscription("MIGRATION")
	client.Subscribe(events)
	defer client.Unsubscribe(events)
	capabilities := map[string]any{"capabilities": []any{map[string]any{"capability": "events", "state": true}}}
	if err := client.Execute(ctx, "migrate-set-capabilities", capabilities, nil); err != nil {
		return err
	}
	uri, err := passSaved(ctx, client, f)
	if err != nil {
		return err
	}
	if err := client.Execute(ctx, "migrate-incoming", map[string]any{"uri": uri}, nil); err != nil {
		if ctx.Err() != nil {
			return err // which says nothing about the state
		}
		return loadError(cfg, err)
	}
	for {
		e, err := events.Next(ctx)
		if err != nil {
			return err
		}
		var data struct{ Status string }
		_ = json.Unmarshal(e.Data, &data) // an event without a status is not the one
		switch data.Status {
		case "completed":
			dropState(ctx, client)
			return loaded(ctx, cfg, client)
		case "failed":
			return loadError(cfg, errors.New("the device state cannot be loaded"))
		}
	}
}

// passSaved gives QEMU the file to load and returns what it is called there.
// From 9.1 on a file is no more to be passed as "fd:".
func passSaved(ctx context.Context, client *qmp.Client, f *os.File) (uri string, err error) {
	if v := client.Version(); v.Major > 9 || v.Major == 9 && v.Minor >= 1 {
		return "file:" + statePath, client.AddFile(ctx, stateSet, f)
	}
	const name = "state"
	return "fd:" + name, client.PassFile(ctx, name, f)
}

// loaded checks the outcome of a load that QEMU calls complete.
func loaded(ctx context.Context, cfg machine.RunConfig, client *qmp.Client) error {
	var status struct{ Status string }
	if err := client.Execute(ctx, "query-status", nil, &status); err != nil {
		return err
	}
	if status.Status != "paused" {
		return loadError(cfg, fmt.Errorf("the status after loading is %q and not paused", status.Status))
	}
	// QEMU locks the disk only now. Before 10.0 it calls a load complete that
	// could not; since then it waits for cont unless it is told to.
	var refused *qmp.Error
	err := client.Execute(ctx, "blockdev-set-active", map[string]any{"active": true}, nil)
	if errors.As(err, &refused) && refused.Class == "CommandNotFound" {
		err = nil
	}
	if strings.Contains(words(cfg), inUse) || err != nil && strings.Contains(err.Error(), noLock) {
		return errdefs.New(errdefs.Conflict, "another process has its disk open (%s)", cfg.Disk[len(cfg.Disk)-1].Path)
	}
	return err
}

// loadError is STORAGE with QEMU's words.
func loadError(cfg machine.RunConfig, err error) error {
	if said := words(cfg); said != "" {
		err = errors.New(said)
	}
	return errdefs.New(errdefs.Storage, "continue from checkpoint %s: %w", cfg.Incoming.Checkpoint, err)
}

// maxWords bounds what is quoted of QEMU, in bytes.
const maxWords = 500

// words is all that the process has printed but warnings, in one line: the last of several
// lines about a failed load says only that it failed.
func words(cfg machine.RunConfig) string {
	var said []string
	for line := range strings.Lines(string(logs.Tail(filepath.Join(cfg.Dir, outputFile), maxWords))) {
		if line = host.LastLine(line); line != "" && !strings.HasPrefix(line, "warning:") {
			said = append(said, line)
		}
	}
	return strings.Join(said, "; ")
}

// yamaScope is where Yama says who may trace whom.
const yamaScope = "/proc/sys/kernel/yama/ptrace_scope"
