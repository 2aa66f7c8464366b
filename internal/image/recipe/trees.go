package recipe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// How long and how many trees are kept. A tree is what the mirror had on the
// day it was made. With the day in its key every first build of a day would
// take a minute and a half; without any limit security fixes would never come
// in: so one is used for a week.
const (
	treeAge   = 7 * 24 * time.Hour
	keptTrees = 3
)

// treeSuffix is that of a whole tree, partialSuffix of one being written.
const (
	treeSuffix    = ".tar.zst"
	partialSuffix = ".partial"
)

// Store keeps the trees that recipes made, each as a tar compressed with zstd
// and called by the key of its recipe.
type Store struct {
	// FS writes the trees; nil for the real one.
	FS *durable.FS
	// Dir is the folder of the trees; it is made when it is needed.
	Dir string
	// TempDir is where packages are unpacked. An ordinary user's build does it
	// as ids that may enter no private folder: every folder on its path lets
	// others pass through.
	TempDir string
	// Now is the time; time.Now but for tests.
	Now func() time.Time
}

// Tree is an open tree. Read gives its tar.
type Tree struct {
	file *os.File
	zstd *zstd.Decoder
	// Bytes is what it takes in the store.
	Bytes int64
	read  int64
}

// Read implements io.Reader. A tree that is damaged gives ErrDamaged.
func (t *Tree) Read(p []byte) (int, error) {
	if t.Bytes == 0 {
		return 0, ErrDamaged // to zstd, nothing is an empty archive
	}
	n, err := t.zstd.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return n, err
}

// Done is how many of Bytes were read.
func (t *Tree) Done() int64 { return t.read }

// Close ends the tree.
func (t *Tree) Close() error {
	t.zstd.Close()
	return t.file.Close()
}

// ErrDamaged is reading a tree that was not kept well; Drop it and Make it again.
var ErrDamaged = errors.New("the kept tree is damaged")

// counter counts what is read of a tree's file.
type counter struct{ tree *Tree }

// Read implements io.Reader.
func (c counter) Read(p []byte) (int, error) {
	n, err := c.tree.file.Read(p)
	c.tree.read += int64(n)
	return n, err
}

// Has reports whether there is a tree of the key that is young enough.
func (s Store) Has(key string) bool {
	tree, err := s.Open(key)
	return err == nil && tree.Close() == nil
}

// Open opens the tree of a key; NOT_FOUND when there is none, or an old one.
func (s Store) Open(key string) (*Tree, error) {
	f, err := os.Open(filepath.Join(s.Dir, key+treeSuffix))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.New(errdefs.NotFound, "open tree %s: there is none", key)
	}
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "open tree %s: %w", key, err)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "open tree %s: %w", key, errors.Join(err, f.Close()))
	}
	if age := s.Now().Sub(info.ModTime()); age < 0 || age > treeAge {
		return nil, errors.Join(errdefs.New(errdefs.NotFound, "open tree %s: it is too old", key), f.Close())
	}
	tree := &Tree{file: f, Bytes: info.Size()}
	if tree.zstd, err = zstd.NewReader(counter{tree}, zstd.WithDecoderConcurrency(1)); err != nil {
		return nil, errors.Join(fmt.Errorf("open tree %s: %w", key, err), f.Close())
	}
	return tree, nil
}

// Make makes the recipe's tree, keeps it, and with it no more than keptTrees.
// When it fails or ctx ends nothing is left.
func (s Store) Make(ctx context.Context, r Recipe, log *Log) error {
	work, err := s.makeWork()
	if err != nil {
		return err
	}
	err = s.add(ctx, r.Key(), func(tree io.Writer) error { return r.Bootstrap(ctx, tree, work, log) })
	// Cleaning up is not for the caller to cancel.
	cleanCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	return errors.Join(err, removeWork(cleanCtx, work))
}

func (s Store) add(ctx context.Context, key string, write func(io.Writer) error) error {
	if err := s.FS.MkdirAll(s.Dir); err != nil {
		return err
	}
	path := filepath.Join(s.Dir, key+treeSuffix)
	// Two builds of one key may run at a time: each writes its own.
	partial := path + "." + durable.NewID() + partialSuffix
	out, err := s.FS.CreateExclusive(partial, 0o600)
	if err != nil {
		return err
	}
	err = compress(out, write)
	if err == nil {
		err = out.Sync()
	}
	if closeErr := out.Close(); err == nil && closeErr != nil {
		err = errdefs.As(errdefs.Storage, closeErr)
	}
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = s.FS.Rename(partial, path)
	}
	if err != nil {
		return errors.Join(err, s.FS.Remove(partial))
	}
	return s.evict()
}

// compress writes what write writes into out. An error of out's comes first:
// the writer's own then only says that nobody read on.
func compress(out io.Writer, write func(io.Writer) error) error {
	kept := &firstError{w: out}
	z, err := zstd.NewWriter(kept, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(2))
	if err != nil {
		return err
	}
	err = write(z)
	closeErr := z.Close()
	switch {
	case kept.err != nil:
		return kept.err
	case err != nil:
		return err
	}
	return closeErr
}

// firstError remembers the first error of its writer.
type firstError struct {
	w   io.Writer
	err error
}

// Write implements io.Writer.
func (f *firstError) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	if err != nil && f.err == nil {
		f.err = err
	}
	return n, err
}

// Drop removes a tree that turned out to be damaged.
func (s Store) Drop(key string) error {
	return s.FS.Remove(filepath.Join(s.Dir, key+treeSuffix))
}

// evict removes the oldest trees beyond keptTrees.
func (s Store) evict() error {
	found, err := filepath.Glob(filepath.Join(globQuote(s.Dir), "*"+treeSuffix))
	if err != nil {
		return err
	}
	age := map[string]time.Time{}
	for _, path := range found {
		if info, err := os.Lstat(path); err == nil {
			age[path] = info.ModTime()
		}
	}
	slices.SortFunc(found, func(a, b string) int { return age[b].Compare(age[a]) })
	for _, path := range found[min(keptTrees, len(found)):] {
		if err := s.FS.Remove(path); err != nil {
			return err
		}
	}
	return nil
}

// Sweep removes what builds that were cut off left behind. None may be under way.
func (s Store) Sweep(ctx context.Context) error {
	partial, err := filepath.Glob(filepath.Join(globQuote(s.Dir), "*"+partialSuffix))
	for _, path := range partial {
		err = errors.Join(err, s.FS.Remove(path))
	}
	works, globErr := filepath.Glob(filepath.Join(globQuote(s.TempDir), s.workPrefix()+"*"))
	err = errors.Join(err, globErr)
	for _, work := range works {
		if owned(work) {
			err = errors.Join(err, removeWork(ctx, work))
		}
	}
	return err
}
