package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/kernel"
)

// maxInitrd is the longest initial RAM disk that is read, in bytes.
const maxInitrd = 1 << 30

// maxKernels is how many kernels of a disk are looked at, the newest first.
const maxKernels = 16

// Boot is what a guest boots with besides its root.
type Boot struct {
	// Version is the kernel's, as uname -r says it.
	Version string
	// Image is the kernel, a bzImage.
	Image []byte
	// Modules are those for the initramfs, in the order in which they load.
	Modules []kernel.Module
	// Notes are what a person should know, a line each.
	Notes []string
}

// Boot takes the newest kernel that has its modules out of the file system, and
// those modules. INVALID: there is none; UNSUPPORTED: it cannot boot here.
func (r Root) Boot(ctx context.Context) (Boot, error) {
	names, err := r.Names(ctx, "/lib/modules")
	if err != nil {
		return Boot{}, err
	}
	versions := kernel.Newest(names)
	for _, version := range versions[:min(maxKernels, len(versions))] {
		image, err := r.kernel(ctx, version)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return Boot{}, err
		}
		says, err := kernel.Version(image)
		if err == nil && says != version {
			err = fmt.Errorf("it says that it is %s", says)
		}
		if err != nil {
			return Boot{}, errdefs.New(errdefs.Invalid, "kernel %s of the disk: %w; give another with --kernel", version, err)
		}
		modules, err := kernel.Modules(ctx, folder{r.Tree, version}, version)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		return Boot{Version: version, Image: image, Modules: modules}, err
	}
	return Boot{}, errdefs.New(errdefs.Invalid, "the disk has no kernel in /boot with modules of its version in /lib/modules; give one with --kernel and --initrd")
}

// kernel finds the kernel of a version: in /boot, or in the file system that
// would be mounted there, or beside its modules.
func (r Root) kernel(ctx context.Context, version string) ([]byte, error) {
	image, err := r.ReadFile(ctx, "/boot/vmlinuz-"+version, kernel.MaxKernel)
	for _, boot := range r.BootTrees {
		if errors.Is(err, fs.ErrNotExist) {
			image, err = boot.ReadFile(ctx, "/vmlinuz-"+version, kernel.MaxKernel)
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		image, err = r.ReadFile(ctx, "/lib/modules/"+version+"/vmlinuz", kernel.MaxKernel)
	}
	return image, err
}

// BootWith takes a kernel that a person has, and its modules out of the initial
// RAM disk at initrd or, if that is empty, out of the file system. A kernel
// without modules there is taken to have all it needs built in, which is noted.
func (r Root) BootWith(ctx context.Context, path, initrd string) (Boot, error) {
	image, err := readKernel(path)
	if err != nil {
		return Boot{}, err
	}
	version, err := kernel.Version(image)
	if err != nil {
		return Boot{}, errdefs.New(errdefs.Invalid, "%s: %w", path, err)
	}
	b := Boot{Version: version, Image: image}
	if initrd != "" {
		b.Modules, err = modulesOf(ctx, initrd, version)
		return b, err
	}
	b.Modules, err = kernel.Modules(ctx, folder{r.Tree, version}, version)
	if errors.Is(err, fs.ErrNotExist) {
		b.Notes = append(b.Notes, fmt.Sprintf("kernel %s has no modules on the disk: it is taken to have virtio and ext4 built in; if it does not boot, give its --initrd", version))
		err = nil
	}
	return b, err
}

func modulesOf(ctx context.Context, initrd, version string) ([]kernel.Module, error) {
	f, err := OpenRegular(initrd)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || info.Size() > maxInitrd {
		return nil, errdefs.New(errdefs.Invalid, "%s: an initrd has at most %d MiB", initrd, maxInitrd>>20)
	}
	modules, err := kernel.Modules(ctx, kernel.Initrd{File: f, Version: version}, version)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.New(errdefs.Invalid, "%s: it has no modules of kernel %s; give the initrd of that kernel", initrd, version)
	}
	return modules, err
}

func readKernel(path string) ([]byte, error) {
	f, err := OpenRegular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	image, err := io.ReadAll(io.LimitReader(f, kernel.MaxKernel+1))
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "read %s: %w", path, err)
	}
	if len(image) > kernel.MaxKernel {
		return nil, errdefs.New(errdefs.Invalid, "%s: a kernel has at most %d MiB", path, kernel.MaxKernel>>20)
	}
	return image, nil
}

// folder is /lib/modules/VERSION of a file system.
type folder struct {
	tree    Tree
	version string
}

// ReadFiles implements kernel.Folder.
func (f folder) ReadFiles(ctx context.Context, names []string, limit int64) (map[string][]byte, error) {
	found := map[string][]byte{}
	for _, name := range names {
		data, err := f.tree.ReadFile(ctx, "/lib/modules/"+f.version+"/"+name, limit)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		found[name] = data
	}
	return found, nil
}
