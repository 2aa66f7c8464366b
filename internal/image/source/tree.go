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

// settle makes the file system sound: one that was not unmounted gets its
// journal replayed, which replayed says; another one has to be as it should.
func (t Tree) settle(ctx context.Context, unclean bool) (replayed bool, err error) {
	if unclean {
		// 1: something was corrected, 2: a mounted one would want a reboot; e2fsck(8).
		line, code, err := t.check(ctx, "-fy")
		if err != nil && (code < 1 || code > 3) {
			return false, damaged(ctx, line, err)
		}
	}
	if line, _, err := t.check(ctx, "-fn"); err != nil {
		return false, damaged(ctx, line, err)
	}
	return unclean, nil
}

func damaged(ctx context.Context, line string, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errdefs.Is(err, errdefs.NoSpace) {
		return err
	}
	return errdefs.New(errdefs.Invalid, "the file system is damaged: %s (%w); repair the original with e2fsck and import it again", line, err)
}

// check runs e2fsck, and gives the first thing that it says is wrong.
func (t Tree) check(ctx context.Context, mode string) (line string, code int, err error) {
	info, err := os.Stat(t.path)
	if err != nil {
		return "", -1, storage(t.path, err)
	}
	var out strings.Builder
	err = recipe.Command{
		Args: []string{"e2fsck", mode, t.path}, Stdout: &limited{w: &out, left: maxOutput}, Stderr: &limited{w: &out, left: maxOutput},
		Limits: &recipe.Limits{Memory: treeMemory, File: info.Size(), CPU: checkCPU},
	}.Run(ctx)
	for text := range strings.Lines(out.String()) {
		text = strings.TrimSpace(text)
		if text != "" && !strings.HasPrefix(text, "e2fsck ") && !strings.HasPrefix(text, "Pass ") && !strings.HasPrefix(text, "Warning") {
			line = text
			break
		}
	}
	code = exitCode(err)
	if err != nil && strings.Contains(out.String(), "No space left on device") {
		err = errdefs.New(errdefs.NoSpace, "repair the file system: no space left; free some and import again")
	}
	return line, code, err
}
