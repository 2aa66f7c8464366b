// Package rootdisk makes an ext4 root disk of a tree of merged layers, as an
// ordinary user and with the owners, modes, devices and extended attributes
// that the tree says. It chooses no kernel and makes no image of the disk.
//
// The tree is placed on disk as files that all belong to the user. mkfs.ext4
// copies them, debugfs adds devices and extended attributes, and then modes,
// owners and times are written into the new file system's inodes. Under
// fakeroot, which tells mkfs.ext4 the owners, each look at a file is a
// conversation of two processes: that takes two to four times as long.
//
//	files, err := img.Merge(ctx, filepath.Join(stage, "scratch"), progress)
//	err = rootdisk.Make(ctx, files, rootdisk.Config{Dir: filepath.Join(stage, "work"), Path: disk, Bytes: size, Log: log})
//	err = os.RemoveAll(stage)
//
// The caller digs holes and syncs, as for the disk of an image that is built.
package rootdisk

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
	"github.com/holdpoint/holdpoint/internal/oci/tree"
)

// Config says what disk to make.
type Config struct {
	// Dir is a private, empty folder for what is needed on the way, on the file
	// system of the tree's scratch folder; what is in it afterwards is the
	// caller's to remove.
	Dir string
	// Path is the disk's file, which is made and must not be there.
	Path string
	// Bytes is the disk's size, whole KiB.
	Bytes int64
	// Log gets what the tools print.
	Log io.Writer
}

// Make places the tree, which is of no use afterwards, and makes a disk of it.
// The disk is not synced and has no holes but those that mkfs.ext4 leaves. A
// tree that does not fit, or that ext4 cannot hold, is INVALID, a full disk NO_SPACE; on any error the
// disk's file may be there and is of no use.
func Make(ctx context.Context, files *tree.Tree, cfg Config) error {
	dir := filepath.Join(cfg.Dir, "tree")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return errdefs.New(errdefs.Storage, "make the root disk: %w", err)
	}
	disk, err := os.OpenFile(cfg.Path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return errdefs.New(errdefs.Storage, "make the root disk: %w", err)
	}
	defer disk.Close()
	found, err := collect(files)
	if err == nil {
		err = files.Place(ctx, dir)
	}
	if err == nil {
		err = format(ctx, cfg, dir)
	}
	if err == nil {
		err = found.add(ctx, cfg)
	}
	if err == nil {
		err = own(ctx, disk, found.attributes)
	}
	if err != nil {
		return fmt.Errorf("make the root disk: %w", err)
	}
	return nil
}

// extras is what mkfs.ext4 does not take over from a tree that was placed.
type extras struct {
	attributes map[string]tree.Attributes // by path
	devices    []string                   // paths
	xattrs     []xattr
}

// xattr is an extended attribute of a file.
type xattr struct{ path, name, value string }

func collect(files *tree.Tree) (extras, error) {
	found := extras{attributes: make(map[string]tree.Attributes)}
	limits := limits{folders: make(map[string]folder)}
	err := files.Walk(func(e tree.Entry) error {
		if err := limits.add(e); err != nil {
			return err
		}
		found.attributes[e.Path] = e.Attributes
		if e.Type == tar.TypeChar || e.Type == tar.TypeBlock {
			found.devices = append(found.devices, e.Path)
		}
		for _, name := range slices.Sorted(maps.Keys(e.Xattrs)) {
			found.xattrs = append(found.xattrs, xattr{e.Path, name, e.Xattrs[name]})
		}
		return nil
	})
	if err == nil {
		err = limits.crowd()
	}
	return found, err
}

// own writes modes, owners and times into the inodes.
func own(ctx context.Context, disk *os.File, attributes map[string]tree.Attributes) error {
	fs, err := openFilesystem(disk)
	if err == nil {
		err = fs.chown(ctx, rootInode, "/", attributes)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return storage(err)
}

// format makes the file system. Like in a built image, inode tables are
// written here and not by each guest.
func format(ctx context.Context, cfg Config, dir string) error {
	var said complaints
	err := recipe.Command{
		Args: []string{
			"mkfs.ext4", "-q", "-F", "-b", "4096", "-L", "holdpoint", "-m", "0",
			"-E", "root_owner=0:0,no_copy_xattrs,lazy_itable_init=0,lazy_journal_init=0",
			"-d", dir, cfg.Path, strconv.FormatInt(cfg.Bytes>>10, 10) + "k",
		},
		Stdout: cfg.Log, Stderr: io.MultiWriter(cfg.Log, &said),
	}.Run(ctx)
	switch {
	case err == nil || ctx.Err() != nil:
		return err
	case strings.Contains(said.text, "No space left on device"):
		return errdefs.New(errdefs.NoSpace, "no space is left for %s; free some and try again", cfg.Path)
	case strings.Contains(said.text, "Could not allocate"):
		return errdefs.New(errdefs.Invalid, "the files do not fit into %d MiB; give it a larger size", cfg.Bytes>>20)
	}
	return fmt.Errorf("%w: %s", err, said.reason())
}

// add makes devices and gives files their extended attributes.
func (found extras) add(ctx context.Context, cfg Config) error {
	requests, err := found.requests(cfg.Dir)
	if err != nil || requests == "" {
		return err
	}
	var said complaints
	err = recipe.Command{
		Args:  []string{"debugfs", "-w", "-f", "-", cfg.Path},
		Stdin: strings.NewReader(requests), Stdout: cfg.Log, Stderr: io.MultiWriter(cfg.Log, &said),
	}.Run(ctx)
	if err != nil {
		return err
	}
	// debugfs succeeds whatever its requests did; but for its version it says
	// nothing unless one failed.
	if reason := said.reason(); reason != "" {
		return fmt.Errorf("run debugfs: %s", reason)
	}
	return nil
}

// requests are debugfs' commands; what it reads of files is put into dir.
func (found extras) requests(dir string) (string, error) {
	var b strings.Builder
	for _, name := range found.devices { // without numbers: debugfs has no large ones
		kind := "b"
		if found.attributes[name].Type == tar.TypeChar {
			kind = "c"
		}
		for _, words := range [][]string{{"cd", path.Dir(name)}, {"mknod", path.Base(name), kind, "0", "0"}} {
			if err := request(&b, words); err != nil {
				return "", fmt.Errorf("make the device %.300q: %w", name, err)
			}
		}
	}
	values := filepath.Join(dir, "attributes")
	if err := os.Mkdir(values, 0o700); err != nil {
		return "", storage(err)
	}
	for i, x := range found.xattrs {
		value := filepath.Join(values, strconv.Itoa(i))
		if err := os.WriteFile(value, []byte(x.value), 0o600); err != nil {
			return "", storage(err)
		}
		if err := request(&b, []string{"ea_set", "-f", value, x.path, x.name}); err != nil {
			return "", fmt.Errorf("set %.300q of %.300q: %w", x.name, x.path, err)
		}
	}
	return b.String(), nil
}

// maxRequest is the longest line for debugfs, in bytes. It takes what is
// beyond 8 KiB for the next line, and a line may be a command of the shell.
const maxRequest = 7 << 10

// request writes a line for debugfs, whose words are between quotes and hold
// neither quotes nor control characters.
func request(b *strings.Builder, words []string) error {
	for _, word := range words {
		if strings.ContainsFunc(word, func(r rune) bool { return r < ' ' || r == '"' }) {
			return errdefs.New(errdefs.Unsupported, "there are characters in its name that debugfs does not understand")
		}
	}
	line := words[0] + ` "` + strings.Join(words[1:], `" "`) + "\"\n"
	if len(line) > maxRequest {
		return errdefs.New(errdefs.Unsupported, "its path is too long for debugfs")
	}
	b.WriteString(line)
	return nil
}

func storage(err error) error {
	if errors.Is(err, syscall.ENOSPC) {
		return errdefs.As(errdefs.NoSpace, err)
	}
	return errdefs.As(errdefs.Storage, err)
}

// complaints keeps the beginning of what a tool complains about.
type complaints struct{ text string }

// Write implements io.Writer.
func (t *complaints) Write(p []byte) (int, error) {
	t.text += string(p[:min(len(p), max(0, 16<<10-len(t.text)))])
	return len(p), nil
}

// reason is the first complaint; empty if there is none but greetings.
func (t *complaints) reason() string {
	for line := range strings.Lines(t.text) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "debugfs ") {
			return line
		}
	}
	return ""
}
