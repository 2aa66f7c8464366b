package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/kernel"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
)

// maxText is the longest text that is taken out of a tree, in bytes.
const maxText = 1 << 20

// found is what a build takes out of a tree besides the root disk.
type found struct {
	version string
	kernel  []byte
	// modules are those of kernel.BootModules that are not built in, by kernel.Key.
	modules map[string][]byte
	// capabilities are what files have of them, as security.capability, by
	// absolute path (capabilities(7)).
	capabilities map[string]string
}

// maxCapabilities is how many files with capabilities a tree may have, and how
// long one value may be: it has 20 or 24 bytes.
const (
	maxCapabilities = 1000
	maxCapability   = 64
)

// scanTree reads a tree to its end and takes the kernel and its boot modules
// out of it.
func scanTree(tree io.Reader) (found, error) {
	f := found{modules: map[string][]byte{}, capabilities: map[string]string{}}
	var builtin []byte
	wanted := map[string]bool{}
	for _, name := range kernel.BootModules() {
		wanted[kernel.Key(name)] = true
	}
	r := tar.NewReader(tree)
	for {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return found{}, fmt.Errorf("read the tree: %w", err)
		}
		if header.Typeflag != tar.TypeReg {
			continue
		}
		name := path.Clean(header.Name)
		if value := header.PAXRecords["SCHILY.xattr.security.capability"]; value != "" {
			if len(f.capabilities) >= maxCapabilities || len(value) > maxCapability {
				return found{}, errdefs.New(errdefs.Invalid, "read the tree: %s has too many or too long capabilities", header.Name)
			}
			f.capabilities["/"+name] = value
		}
		base := path.Base(name)
		module, isModule := strings.CutSuffix(base, ".ko")
		switch {
		case name == recipe.Extra+"/kernel":
			f.kernel, err = readLimited(r, header, kernel.MaxKernel)
		case name == recipe.Extra+"/version":
			var text []byte
			text, err = readLimited(r, header, maxText)
			f.version = strings.TrimSpace(string(text))
		case !strings.HasPrefix(name, "usr/lib/modules/"):
		case base == "modules.builtin":
			builtin, err = readLimited(r, header, maxText)
		case isModule && wanted[kernel.Key(module)]:
			f.modules[kernel.Key(module)], err = readLimited(r, header, kernel.MaxModule)
		}
		if err != nil {
			return found{}, err
		}
	}
	// The tools downstream want what follows the archive's end, too.
	if _, err := io.Copy(io.Discard, tree); err != nil {
		return found{}, fmt.Errorf("read the tree: %w", err)
	}
	return f, f.check(builtin)
}

func readLimited(r io.Reader, header *tar.Header, limit int64) ([]byte, error) {
	if header.Size > limit {
		return nil, errdefs.New(errdefs.Invalid, "read the tree: %s is longer than %d bytes", header.Name, limit)
	}
	data, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("read %s in the tree: %w", header.Name, err)
	}
	return data, nil
}

// check refuses a tree that could not boot.
func (f found) check(builtin []byte) error {
	if len(f.kernel) == 0 || f.version == "" {
		return errdefs.New(errdefs.Invalid, "read the tree: it has no kernel")
	}
	inKernel := kernel.Builtin(builtin)
	for _, name := range kernel.BootModules() {
		key := kernel.Key(name)
		if _, ok := f.modules[key]; ok || slices.Contains(inKernel, key) || optional(name) {
			continue
		}
		return errdefs.New(errdefs.Unsupported, "read the tree: kernel %s has no module %s", f.version, name)
	}
	return nil
}

// optional names what some kernels do not have at all, because what would need
// it is configured without it, or a guest can do without; loading the others
// in order tells.
func optional(name string) bool {
	return slices.Contains([]string{
		"virtio_pci_legacy_dev", "virtio_pci_modern_dev", "failover", "net_failover", "inet_diag", "tcp_diag",
	}, name)
}

// inOrder are the boot modules of the tree in the order in which they load; the
// others are built into its kernel, check made sure.
func (f found) inOrder() []kernel.Module {
	var modules []kernel.Module
	for _, name := range kernel.BootModules() {
		if data, ok := f.modules[kernel.Key(name)]; ok {
			modules = append(modules, kernel.Module{Name: name, Data: data})
		}
	}
	return modules
}
