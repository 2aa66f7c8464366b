// Package kernel finds out what a guest's kernel needs before it has a root
// disk: which version it is, and which modules it wants loaded, in which order.
// Kernels, modules and initial RAM disks may be hostile. It boots nothing.
package kernel

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"path"
	"regexp"
	"slices"
	"strings"
)

// Limits on what is taken, in bytes: several times what distributions have.
const (
	MaxKernel = 64 << 20
	MaxModule = 4 << 20
	maxIndex  = 8 << 20
)

// Module is a kernel module for the initramfs: the uncompressed content of NAME.ko.
type Module struct {
	Name string
	Data []byte
}

// BootModules are the kernel modules that a guest needs before it has a root
// disk, in the order in which they load: each after those it depends on.
// Debian's cloud kernel has ext4 and PCI built in, virtio as modules.
func BootModules() []string {
	return []string{
		"virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci",
		"virtio_blk", "virtio_console", "virtio-rng", "failover", "net_failover", "virtio_net",
		"pvpanic", "pvpanic-mmio", // or a panic looks like a reset
		"inet_diag", "tcp_diag", // with them the agent ends connections after a restore
	}
}

// Key is a module's name as the kernel knows it: file names use - and _ for
// the same thing.
func Key(name string) string { return strings.ReplaceAll(name, "-", "_") }

// Builtin reads modules.builtin: the keys of what is in the kernel itself.
func Builtin(data []byte) []string {
	var keys []string
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		keys = append(keys, keyOf(lines.Text()))
	}
	return keys
}

// suffixes are those of modules, compressed or not.
func suffixes() []string { return []string{".ko", ".ko.gz", ".ko.xz", ".ko.zst"} }

// keyOf is the key of the module in the file; empty if it is none.
func keyOf(file string) string {
	base := path.Base(file)
	for _, suffix := range suffixes() {
		if name, ok := strings.CutSuffix(base, suffix); ok {
			return Key(name)
		}
	}
	return ""
}

var versionPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._+~-]{0,127}$`)

// Version is the version of a kernel, as uname -r says it: the first word of
// the text that the setup header of a bzImage points to (the kernel's
// Documentation/arch/x86/boot.rst).
func Version(image []byte) (string, error) {
	const magicAt, textAt = 0x202, 0x20e
	if len(image) < 0x250 || string(image[magicAt:magicAt+4]) != "HdrS" {
		return "", errors.New("it is no Linux kernel for x86-64 (a bzImage)")
	}
	at := 0x200 + int(binary.LittleEndian.Uint16(image[textAt:]))
	if at == 0x200 || at >= len(image) {
		return "", errors.New("the kernel does not say its version")
	}
	text := image[at:min(at+256, len(image))]
	if i := bytes.IndexByte(text, 0); i >= 0 {
		text = text[:i]
	}
	version, _, _ := strings.Cut(string(text), " ")
	if !versionPattern.MatchString(version) {
		return "", errors.New("the kernel does not say its version")
	}
	return version, nil
}

// Newest sorts versions, the newest first: numbers in them count as such. What
// is no version is left out.
func Newest(names []string) []string {
	var versions []string
	for _, name := range names {
		if versionPattern.MatchString(name) {
			versions = append(versions, name)
		}
	}
	slices.SortFunc(versions, func(a, b string) int { return compare(b, a) })
	return versions
}

// compare orders two versions, number by number.
func compare(a, b string) int {
	digits := func(s string) int {
		return len(s) - len(strings.TrimLeft(s, "0123456789"))
	}
	for a != "" && b != "" {
		if i, j := digits(a), digits(b); i > 0 && j > 0 {
			x, y := strings.TrimLeft(a[:i], "0"), strings.TrimLeft(b[:j], "0")
			if len(x) != len(y) {
				return len(x) - len(y)
			}
			if c := strings.Compare(x, y); c != 0 {
				return c
			}
			a, b = a[i:], b[j:]
			continue
		}
		if a[0] != b[0] {
			return int(a[0]) - int(b[0])
		}
		a, b = a[1:], b[1:]
	}
	return len(a) - len(b)
}
