package kernel

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
)

// maxModules is how many modules a boot may take: far more than it does.
const maxModules = 64

// Folder is the folder of a kernel's modules, /lib/modules/VERSION.
type Folder interface {
	// ReadFiles gives the content of the files of these names below the folder;
	// those that are not there are left out. One longer than limit bytes is
	// INVALID.
	ReadFiles(ctx context.Context, names []string, limit int64) (map[string][]byte, error)
}

// wanted are the modules to take of any kernel: what the root disk's file system
// needs, too, since a kernel that is not for clouds has that as a module.
func wanted() []string {
	return append([]string{"crc32c_generic", "ext4"}, BootModules()...)
}

// needed are those without which no guest boots; the others some kernels do not
// have at all, or have for what a guest can do without.
func needed() []string {
	return []string{"ext4", "virtio_ring", "virtio", "virtio_pci", "virtio_blk", "virtio_console"}
}

// Modules takes what the kernel of a version needs out of its folder, in the
// order in which it loads. fs.ErrNotExist: the folder is not there or not
// complete; UNSUPPORTED: the kernel cannot boot here.
func Modules(ctx context.Context, from Folder, version string) ([]Module, error) {
	index, err := from.ReadFiles(ctx, []string{"modules.dep", "modules.builtin"}, maxIndex)
	if err != nil {
		return nil, err
	}
	if index["modules.dep"] == nil {
		return nil, fs.ErrNotExist
	}
	paths, err := resolve(index["modules.dep"], Builtin(index["modules.builtin"]), version)
	if err != nil {
		return nil, err
	}
	files, err := from.ReadFiles(ctx, paths, MaxModule)
	if err != nil {
		return nil, err
	}
	var modules []Module
	for _, p := range paths {
		data, ok := files[p]
		if !ok {
			return nil, errdefs.New(errdefs.Invalid, "module %s of kernel %s is not there, though modules.dep names it", p, version)
		}
		if data, err = unpack(ctx, p, data); err != nil {
			return nil, errdefs.New(errdefs.Invalid, "module %s of kernel %s: %w", p, version, err)
		}
		modules = append(modules, Module{Name: keyOf(p), Data: data})
	}
	return modules, nil
}

// resolve finds the paths of the wanted modules and of all they depend on, each
// once and after those it depends on.
func resolve(dep []byte, builtin []string, version string) ([]string, error) {
	needs := parseDep(dep)
	byKey := map[string]string{}
	for _, p := range slices.Sorted(maps.Keys(needs)) {
		byKey[keyOf(p)] = p
	}
	var order []string
	seen := map[string]bool{}
	var take func(p string)
	take = func(p string) {
		if seen[p] || len(seen) > maxModules {
			return
		}
		seen[p] = true
		for _, below := range needs[p] {
			take(below)
		}
		order = append(order, p)
	}
	for _, name := range wanted() {
		p, ok := byKey[Key(name)]
		switch {
		case ok:
			take(p)
		case slices.Contains(needed(), name) && !slices.Contains(builtin, Key(name)):
			return nil, errdefs.New(errdefs.Unsupported, "kernel %s has no module %s, which a guest boots with", version, name)
		}
	}
	if len(seen) > maxModules {
		return nil, errdefs.New(errdefs.Unsupported, "kernel %s: its boot modules depend on more than %d others", version, maxModules)
	}
	return order, nil
}

// modulePath matches the path of a module in modules.dep.
var modulePath = regexp.MustCompile(`^[A-Za-z0-9_+,.-]+(/[A-Za-z0-9_+,.-]+)*$`)

// parseDep reads modules.dep (depmod(8)): a module, a colon, and all it depends
// on. Lines that say nothing of use are left out.
func parseDep(data []byte) map[string][]string {
	needs := map[string][]string{}
	usable := func(p string) bool {
		return len(p) < 256 && modulePath.MatchString(p) && path.Clean(p) == p && keyOf(p) != "" && !strings.HasPrefix(p, "..")
	}
	for line := range strings.Lines(string(data)) {
		p, rest, ok := strings.Cut(line, ":")
		if !ok || !usable(p) {
			continue
		}
		below := strings.Fields(rest)
		slices.Reverse(below) // the last one loads first
		needs[p] = slices.DeleteFunc(below, func(p string) bool { return !usable(p) })
	}
	return needs
}

// unpack undoes the compression of a module, by its name.
func unpack(ctx context.Context, file string, data []byte) ([]byte, error) {
	r, err := unpacker(ctx, path.Ext(file), bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	plain, err := io.ReadAll(io.LimitReader(r, MaxModule+1))
	switch {
	case err != nil:
		return nil, err
	case len(plain) > MaxModule:
		return nil, errors.New("it is longer than it may be")
	case !bytes.HasPrefix(plain, []byte("\x7fELF")):
		return nil, errors.New("it is no module")
	}
	return plain, nil
}

// unpacker undoes the compression that a suffix names.
func unpacker(ctx context.Context, suffix string, r io.Reader) (io.ReadCloser, error) {
	switch suffix {
	case ".gz":
		return gzip.NewReader(r)
	case ".zst":
		z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(128<<20))
		if err != nil {
			return nil, err
		}
		return z.IOReadCloser(), nil
	case ".xz":
		return unxz(ctx, r)
	}
	return io.NopCloser(r), nil
}

// unxz runs xz. Closing what it gives ends it.
func unxz(ctx context.Context, r io.Reader) (io.ReadCloser, error) {
	if _, err := recipe.FindTool("xz"); err != nil {
		return nil, errors.New("xz is missing; run: sudo apt-get install xz-utils")
	}
	ctx, stop := context.WithCancel(ctx)
	out, in := io.Pipe()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		in.CloseWithError(recipe.Command{
			Args: []string{"xz", "-dc"}, Stdin: r, Stdout: in,
			Limits: &recipe.Limits{Memory: 512 << 20, CPU: time.Minute},
		}.Run(ctx))
	}()
	return &process{PipeReader: out, stop: stop, ended: ended}, nil
}

// process is the output of one.
type process struct {
	*io.PipeReader
	stop  func()
	ended <-chan struct{}
}

// Close implements io.Closer.
func (p *process) Close() error {
	p.stop()
	err := p.PipeReader.Close()
	<-p.ended
	return err
}
