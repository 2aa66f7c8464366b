package source

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
)

// Limits of the tools of e2fsprogs, which read file systems that may be hostile.
const (
	treeMemory = 2 << 30
	lookCPU    = time.Minute
	checkCPU   = 20 * time.Minute
)

// Tree is an ext4 file system in a file of ours, read without mounting it.
type Tree struct{ path string }

// plainName matches the names that are safe in a request to debugfs; what is
// wanted of a guest's boot files has no others.
var plainName = regexp.MustCompile(`^[A-Za-z0-9._+~,@:/-]+$`)

// ReadFile gives the content of the regular file of an absolute name, whose
// folders may be symbolic links but which is none itself. One that is not there
// is fs.ErrNotExist; one longer than limit bytes, INVALID.
func (t Tree) ReadFile(ctx context.Context, name string, limit int64) ([]byte, error) {
	var data bytes.Buffer
	if err := t.ask(ctx, "cat", name, &limited{w: &data, left: limit}); err != nil {
		return nil, err
	}
	return data.Bytes(), nil
}

// Names lists a folder, without its order; what debugfs could not be asked for
// again is left out. A folder that is not there is empty.
func (t Tree) Names(ctx context.Context, folder string) ([]string, error) {
	var list strings.Builder
	err := t.ask(ctx, "ls -p", folder, &limited{w: &list, left: maxOutput})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for line := range strings.Lines(list.String()) {
		// /inode/mode/uid/gid/name/size/
		fields := strings.Split(strings.TrimRight(line, "\n"), "/")
		if len(fields) == 8 && plainName.MatchString(fields[5]) && strings.Trim(fields[5], ".") != "" {
			names = append(names, fields[5])
		}
	}
	return names, nil
}

// kind is the type of what has the name, as debugfs says it: "regular",
// "directory", "symlink"; empty when there is nothing.
func (t Tree) kind(ctx context.Context, name string) (string, error) {
	var text strings.Builder
	err := t.ask(ctx, "stat", name, &limited{w: &text, left: maxOutput})
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	_, after, _ := strings.Cut(text.String(), "Type: ")
	word, _, _ := strings.Cut(after, " ")
	return word, nil
}

// isRoot reports whether it is what a guest can have as its root: it holds /etc
// and an init or a shell.
func (t Tree) isRoot(ctx context.Context) (bool, error) {
	etc, err := t.kind(ctx, "/etc")
	if err != nil || etc != "directory" {
		return false, err
	}
	for _, name := range []string{"/sbin/init", "/usr/sbin/init", "/bin/init", "/usr/lib/systemd/systemd", "/lib/systemd/systemd", "/bin/sh", "/usr/bin/sh"} {
		kind, err := t.kind(ctx, name)
		if err != nil || kind == "regular" || kind == "symlink" {
			return err == nil, err
		}
	}
	return false, nil
}

// ask makes one request to debugfs, which succeeds whatever became of it: but
// for its version it says nothing unless it failed.
func (t Tree) ask(ctx context.Context, request, name string, out *limited) error {
	if !plainName.MatchString(name) {
		return errdefs.New(errdefs.Invalid, "read %q in the file system: it is no plain name", name)
	}
	disk, err := os.Open(t.path)
	if err != nil {
		return errdefs.New(errdefs.Storage, "read the file system: %w", err)
	}
	defer disk.Close()
	var complaints strings.Builder
	err = recipe.Command{
		Args: []string{"debugfs", "-R", request + " " + name, "/dev/stdin"}, Stdin: disk, Stdout: out,
		Stderr: &limited{w: &complaints, left: maxOutput},
		Limits: &recipe.Limits{Memory: treeMemory, CPU: lookCPU},
	}.Run(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if out.over {
		return errdefs.New(errdefs.Invalid, "read %s in the file system: it is longer than it may be", name)
	}
	for line := range strings.Lines(complaints.String()) {
		line = strings.TrimSpace(line)
		switch {
		case line == "" || strings.HasPrefix(line, "debugfs "):
		case strings.Contains(line, "File not found"), strings.Contains(line, "not a directory"):
			return fmt.Errorf("read %s in the file system: %w", name, fs.ErrNotExist)
		default:
			return errdefs.New(errdefs.Invalid, "read %s in the file system: %s", name, line)
		}
	}
	if err != nil {
		return errdefs.New(errdefs.Invalid, "read %s in the file system: %w", name, err)
	}
	return nil
}

// settle makes the file system sound, and returns what a person should know of
// that. One that was not unmounted gets its journal replayed, and what a crash
// leaves corrected; another one has to be as it should.
func (t Tree) settle(ctx context.Context, unclean bool) (note string, err error) {
	if unclean {
		// 1: something was corrected, 2: a mounted one would want a reboot; e2fsck(8).
		found, err := t.check(ctx, "-fy")
		if err != nil && (found.code < 1 || found.code > 3) {
			return "", damaged(ctx, found, err)
		}
		note = "the file system was not unmounted: its journal was replayed in the image"
		if found.corrected > 0 {
			note += fmt.Sprintf(", and e2fsck corrected %d things", found.corrected)
		}
		note += "; the file is as it was"
	}
	if found, err := t.check(ctx, "-fn"); err != nil {
		return "", damaged(ctx, found, err)
	}
	return note, nil
}

func damaged(ctx context.Context, found findings, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errdefs.Is(err, errdefs.NoSpace) {
		return err
	}
	return errdefs.New(errdefs.Invalid, "the file system is damaged: %s (%w); repair the original with e2fsck and import it again", found.first, err)
}

// findings are what e2fsck says.
type findings struct {
	code int
	// first is the first thing that is wrong, and corrected how many were.
	first     string
	corrected int
}

// check runs e2fsck.
func (t Tree) check(ctx context.Context, mode string) (findings, error) {
	info, err := os.Stat(t.path)
	if err != nil {
		return findings{code: -1}, storage(t.path, err)
	}
	var text strings.Builder
	out := &limited{w: &text, left: maxOutput}
	err = recipe.Command{
		Args: []string{"e2fsck", mode, t.path}, Stdout: out, Stderr: out,
		Limits: &recipe.Limits{Memory: treeMemory, File: info.Size(), CPU: checkCPU},
	}.Run(ctx)
	found := findings{code: exitCode(err), corrected: strings.Count(text.String(), "? yes")}
	for line := range strings.Lines(text.String()) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "e2fsck ") && !strings.HasPrefix(line, "Pass ") && !strings.HasPrefix(line, "Warning") {
			found.first = line
			break
		}
	}
	if err != nil && strings.Contains(text.String(), "No space left on device") {
		err = errdefs.New(errdefs.NoSpace, "repair the file system: no space left; free some and import again")
	}
	return found, err
}
