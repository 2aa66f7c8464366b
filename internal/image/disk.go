package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
)

// diskScript unpacks a tree from its input into the folder $1 and makes of it
// the ext4 file system $2 of the size $3. Under fakeroot owners, modes and
// devices are what they are for root, whoever builds. Capabilities are not:
// mkfs.ext4 cannot read them under fakeroot, so setCapabilities adds them.
//
// What its owner may not read, an ordinary user's tools cannot read either,
// unless fakeroot's chmod has had its hands on it: it leaves the real file
// readable.
//
// The inode tables are written here (lazy_itable_init=0) and made holes by
// sparse.DigHoles: otherwise every guest would write those 128 MiB of zeros into its
// own disk soon after its first boot.
const diskScript = `set -eu
tar -C "$1" --numeric-owner --no-xattrs --exclude=./.holdpoint -xpf -
find "$1" -type f ! -perm -0400 -exec chmod u+r '{}' ';' -exec chmod u-r '{}' ';'
exec mkfs.ext4 -q -F -L holdpoint -m 0 -E root_owner=0:0,lazy_itable_init=0,lazy_journal_init=0 -d "$1" "$2" "$3"
`

// unpack reads the tree once: the kernel and modules are taken out of it while
// the root disk is made of it in the stage.
func (b *build) unpack(ctx context.Context) (found, error) {
	kept, err := b.store.Open(b.recipe.Key())
	if err != nil {
		return found{}, err
	}
	defer kept.Close()
	tree, root := filepath.Join(b.stage.dir, "tree"), filepath.Join(b.stage.dir, rootFile)
	for _, path := range []string{tree, root, filepath.Join(b.stage.dir, "capabilities")} {
		if err := b.cfg.FS.RemoveAll(path); err != nil {
			return found{}, err
		}
	}
	if err := os.Mkdir(tree, 0o700); err != nil {
		return found{}, errdefs.New(errdefs.Storage, "unpack the tree: %w", err)
	}
	made, err := b.makeDisk(ctx, &meter{tree: kept, report: b.report}, tree, root)
	if err != nil {
		return found{}, err
	}
	if err := b.setCapabilities(ctx, root, made.capabilities); err != nil {
		return found{}, err
	}
	return made, b.cfg.FS.RemoveAll(tree)
}

// setCapabilities gives files in a root disk their capabilities.
func (b *build) setCapabilities(ctx context.Context, root string, capabilities map[string]string) error {
	if len(capabilities) == 0 {
		return nil
	}
	dir := filepath.Join(b.stage.dir, "capabilities")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return errdefs.New(errdefs.Storage, "set capabilities: %w", err)
	}
	var requests strings.Builder
	for i, path := range slices.Sorted(maps.Keys(capabilities)) {
		if strings.ContainsFunc(path, func(r rune) bool { return r < ' ' || r == '"' }) {
			return errdefs.New(errdefs.Unsupported, "set capabilities: the name %q is none that debugfs understands", path)
		}
		value := filepath.Join(dir, strconv.Itoa(i))
		if err := os.WriteFile(value, []byte(capabilities[path]), 0o600); err != nil {
			return errdefs.New(errdefs.Storage, "set capabilities: %w", err)
		}
		fmt.Fprintf(&requests, "ea_set -f \"%s\" \"%s\" security.capability\n", value, path)
	}
	var complaints strings.Builder
	err := recipe.Command{
		Args:  []string{"debugfs", "-w", "-f", "-", root},
		Stdin: strings.NewReader(requests.String()), Stdout: b.log, Stderr: &complaints,
	}.Run(ctx)
	if err != nil {
		return fmt.Errorf("set capabilities: %w", err)
	}
	// debugfs succeeds whatever its requests did; but for its version it says
	// nothing unless one failed.
	for line := range strings.Lines(complaints.String()) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "debugfs ") {
			return fmt.Errorf("set capabilities: %s", line)
		}
	}
	return b.cfg.FS.RemoveAll(dir)
}

// makeDisk feeds the tree to diskScript and scanTree at the same time.
func (b *build) makeDisk(ctx context.Context, tree io.Reader, dir, root string) (found, error) {
	toolCtx, stop := context.WithCancel(ctx)
	defer stop()
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := recipe.Command{
			Args:  []string{"fakeroot", "--", "sh", "-c", diskScript, "sh", dir, root, strconv.FormatInt(b.cfg.DiskBytes>>10, 10) + "k"},
			Stdin: r, Stdout: b.log, Stderr: b.log,
		}.Run(toolCtx)
		r.CloseWithError(errToolEnded)
		ended <- err
	}()
	made, scanErr := scanTree(io.TeeReader(tree, w))
	if scanErr != nil && !errors.Is(scanErr, errToolEnded) {
		// The tool must not take half a tree for a whole one.
		stop()
	}
	w.Close()
	toolErr := <-ended
	switch {
	case ctx.Err() != nil:
		return found{}, ctx.Err()
	case scanErr != nil && !errors.Is(scanErr, errToolEnded):
		return found{}, scanErr
	case toolErr != nil:
		return found{}, b.explainDisk(toolErr)
	}
	return made, nil
}

// errToolEnded is what writing to a tool gives that has ended already.
var errToolEnded = errors.New("the tool has ended")

func (b *build) explainDisk(err error) error {
	reason := b.log.Reason()
	if reason == "" {
		reason = err.Error()
	}
	switch {
	case b.log.SawFull():
		return errdefs.New(errdefs.NoSpace, "make the root disk: no space left in %s; free some and build again", b.cfg.ImagesDir)
	case strings.Contains(reason, "Could not allocate"):
		return errdefs.New(errdefs.Invalid, "make the root disk: the packages do not fit into %d MiB; give a larger --size", b.cfg.DiskBytes>>20)
	}
	return fmt.Errorf("make the root disk: %s; all output is in %s", reason, b.log.Path())
}

// meter reports how much was read of a tree, once per MiB.
type meter struct {
	tree     *recipe.Tree
	reported int64
	report   func(phase string, done, total int64)
}

// Read implements io.Reader.
func (m *meter) Read(p []byte) (int, error) {
	n, err := m.tree.Read(p)
	if done := m.tree.Done(); done-m.reported >= 1<<20 {
		m.reported = done
		m.report("making the root disk", done, m.tree.Bytes)
	}
	return n, err
}

// Space that a build needs, in bytes: what the recipe's own packages take,
// twice, because the root disk is made of their tree.
const (
	treeSpace  = 1 << 30
	stageSpace = 3 << 29
)

// checkSpace refuses a build that would fill a disk.
func (b *build) checkSpace() error {
	if err := needSpace(b.cfg.ImagesDir, stageSpace); err != nil {
		return err
	}
	if !b.cfg.Fresh && b.store.Has(b.recipe.Key()) {
		return nil
	}
	need := int64(treeSpace)
	if sameDevice(b.cfg.ImagesDir, b.cfg.TempDir) {
		need = max(need, stageSpace) // the tree is gone before the stage is there
	}
	return needSpace(b.cfg.TempDir, need)
}

func needSpace(dir string, need int64) error {
	free, err := durable.FreeBytes(dir)
	if err != nil {
		return err
	}
	if free < need {
		return errdefs.New(errdefs.NoSpace, "space in %s: %d MiB are free and %d MiB are needed; free some and build again", dir, free>>20, need>>20)
	}
	return nil
}

func sameDevice(a, b string) bool {
	var statA, statB unix.Stat_t
	return unix.Stat(a, &statA) == nil && unix.Stat(b, &statB) == nil && statA.Dev == statB.Dev
}
