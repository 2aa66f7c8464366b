//go:build linux

// Package merge makes one layer of several layers of a disk chain, with a QEMU
// of its own that runs no guest: chains stay short when they are opened. The
// merged file is a copy, which can be made again; no layer is ever changed, and
// which layers are worth it is its caller's to decide.
package merge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
	"github.com/holdpoint/holdpoint/internal/undo"
)

// exitPatience is how long QEMU may take to end after its work.
const exitPatience = 10 * time.Second

// lowest is the nice value of a QEMU for which nobody waits.
const lowest = 19

// Config is what a Merger works with.
type Config struct {
	// Host knows the QEMU binary.
	Host *host.Host
	// Files is the door to the disk; nil is the usual one.
	Files *durable.FS
}

// Merger makes merged layers. It has no state.
type Merger struct {
	cfg  Config
	disk *disk.Disk
}

// New returns a Merger.
func New(cfg Config) *Merger {
	return &Merger{cfg: cfg, disk: disk.New(disk.Config{FS: cfg.Files})}
}

// Merge makes a qcow2 file at job.Path that shows, over what is below, what the
// layers show over it. They may be in use by readers. The file appears complete
// or not at all, and is durable; one that is there already is replaced. NO_SPACE
// when the host's disk is full.
func (m *Merger) Merge(ctx context.Context, job disk.Merge) error {
	below, layers, path := job.Below, job.Layers, job.Path
	if len(layers) < 2 || !filepath.IsAbs(path) {
		return errdefs.New(errdefs.Invalid, "merge %d layers into %q: give two layers or more and an absolute path", len(layers), path)
	}
	var steps undo.Stack
	defer steps.Run()
	name := durable.NewID()
	base := disk.Layer{ID: "base-" + name, Path: filepath.Join(filepath.Dir(path), "."+name+".tmp"), Format: disk.Qcow2}
	top := disk.Layer{ID: "top-" + name, Path: filepath.Join(filepath.Dir(path), "."+name+".top.tmp"), Format: disk.Qcow2}
	steps.Add(func() { _ = os.Remove(base.Path) }) // a rename has taken it away, or it is litter
	if err := copyFile(ctx, layers[0].Path, base.Path, job.BytesPerSecond); err != nil {
		return err
	}
	size, err := disk.VirtualSize(layers[len(layers)-1])
	if err != nil {
		return err
	}
	steps.Add(func() { _ = os.Remove(top.Path) }) // never of any use
	if err := m.disk.Create(ctx, top.Path, size); err != nil {
		return err
	}
	chain := slices.Concat(below, []disk.Layer{base}, layers[1:], []disk.Layer{top})
	if err := m.commit(ctx, chain, base, layers[len(layers)-1], job.BytesPerSecond); err != nil {
		return fmt.Errorf("merge %d layers up to %s: %w", len(layers), layers[len(layers)-1].ID, err)
	}
	if _, err := m.disk.Seal(ctx, base.Path); err != nil {
		return err
	}
	if err := m.cfg.Files.Sync(base.Path); err != nil {
		return err
	}
	return m.cfg.Files.Rename(base.Path, path)
}

// copyFile copies a layer, sharing its blocks where the file system can.
func copyFile(ctx context.Context, from, to string, bytesPerSecond int64) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return errdefs.New(errdefs.Storage, "copy layer: %w", err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return errdefs.New(errdefs.Storage, "copy layer: %w", err)
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	piece := int64(64 << 20)
	always := make(chan time.Time)
	close(always)
	turn := (<-chan time.Time)(always)
	if bytesPerSecond > 0 {
		piece = max(bytesPerSecond/10, 4096)
		ticker := time.NewTicker(100 * time.Millisecond)
		defer ticker.Stop()
		turn = ticker.C
	}
	for err == nil {
		select {
		case <-turn:
			_, err = io.CopyN(out, in, piece) // by copy_file_range(2)
		case <-ctx.Done():
			return fmt.Errorf("copy layer %q: %w", from, ctx.Err())
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return errdefs.New(errdefs.Storage, "copy layer %q: %w", from, err)
}

// commit lets QEMU write what is above base, up to the layer upTo, into base.
func (m *Merger) commit(ctx context.Context, chain []disk.Layer, base, upTo disk.Layer, bytesPerSecond int64) error {
	caps, err := m.cfg.Host.Probe(ctx)
	if err != nil {
		return err
	}
	node, err := disk.MergeJSON(chain)
	if err != nil {
		return err
	}
	ours, theirs, err := host.SocketPair()
	if err != nil {
		return err
	}
	defer ours.Close()
	var printed strings.Builder
	cmd := exec.CommandContext(ctx, caps.Binary, "-machine", "none", "-nodefaults", "-no-user-config", "-display", "none",
		"-sandbox", host.Sandbox, "-chardev", "socket,id=qmp,fd=3", "-mon", "chardev=qmp,mode=control", "-blockdev", string(node))
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = "/", &printed, &printed, exitPatience
	defer host.Bind(cmd)()
	if err := cmd.Start(); err != nil {
		_ = theirs.Close()
		return errdefs.New(errdefs.Unsupported, "start QEMU: %w; %s", err, host.PackageAdvice)
	}
	_ = theirs.Close()      // QEMU has its own
	if bytesPerSecond > 0 { // its threads, none of which works yet, inherit it
		_ = unix.Setpriority(unix.PRIO_PROCESS, cmd.Process.Pid, lowest)
	}
	err = job(ctx, ours, chain[len(chain)-1], base, upTo, bytesPerSecond)
	if err != nil {
		_ = cmd.Process.Kill() // it may have ended by itself
	}
	if wait := cmd.Wait(); wait != nil || err != nil {
		return explain(ctx, errors.Join(err, wait), printed.String())
	}
	return nil
}

func explain(ctx context.Context, err error, printed string) error {
	line := host.LastLine(printed)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case strings.Contains(line+err.Error(), "No space left on device"):
		return errdefs.New(errdefs.NoSpace, "the disk is full: %w", err)
	case line != "":
		return fmt.Errorf("QEMU: %s: %w", line, err)
	}
	return err
}
