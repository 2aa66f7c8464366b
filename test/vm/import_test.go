package vm_test

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/u-root/u-root/pkg/cpio"

	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/image/source/sourcetest"
	"github.com/holdpoint/holdpoint/test/session"
)

// commands are those of sessions, and:
//
//	clouddisk FILE         makes a qcow2 file as distributions have them for
//	                       clouds: the prepared image's root with its kernel in
//	                       /boot, not unmounted, on a partition between others
//	baredisk FILE KERNEL INITRD
//	                       copies the prepared image's root and its kernel, and
//	                       makes an initrd with that one's modules
//	containers             writes container images, as containers says
func commands(t testing.TB) map[string]func(*testscript.TestScript, bool, []string) {
	all := session.Commands()
	all["clouddisk"] = func(ts *testscript.TestScript, neg bool, args []string) {
		session.Usage(ts, neg, args, 1, "clouddisk FILE")
		ts.Check(cloudDisk(ts.MkAbs(args[0])))
	}
	all["baredisk"] = func(ts *testscript.TestScript, neg bool, args []string) {
		session.Usage(ts, neg, args, 3, "baredisk FILE KERNEL INITRD")
		from := os.Getenv(imageVariable)
		ts.Check(copyFile(filepath.Join(from, "root.img"), ts.MkAbs(args[0])))
		ts.Check(copyFile(filepath.Join(from, "kernel"), ts.MkAbs(args[1])))
		ts.Check(initrd(ts.MkAbs(args[2]), filepath.Join(from, "root.img")))
	}
	all["containers"] = func(ts *testscript.TestScript, neg bool, args []string) {
		session.Usage(ts, neg, args, 0, "containers")
		ts.Check(containers(t, ts.MkAbs(".")))
	}
	return all
}

func cloudDisk(path string) error {
	from := os.Getenv(imageVariable)
	data, err := os.ReadFile(filepath.Join(from, "manifest.json"))
	if err != nil {
		return err
	}
	var m image.Manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return err
	}
	root, raw := path+".root", path+".raw"
	defer os.Remove(root)
	defer os.Remove(raw)
	if err := copyFile(filepath.Join(from, "root.img"), root); err != nil {
		return err
	}
	if err := os.Chmod(root, 0o600); err != nil {
		return err
	}
	const mib = 1 << 20
	for _, args := range [][]string{
		{"debugfs", "-w", "-R", fmt.Sprintf("write %s/kernel /boot/vmlinuz-%s", from, m.KernelVersion), root},
		{"debugfs", "-w", "-R", "feature needs_recovery", root},
	} {
		if err := tool(args...); err != nil {
			return err
		}
	}
	err = sourcetest.WriteDisk(raw, m.DiskBytes+129*mib, map[int]string{1: root},
		sourcetest.Partition{Number: 1, Type: sourcetest.Root, Offset: 128 * mib, Size: m.DiskBytes},
		sourcetest.Partition{Number: 14, Type: "21686148-6449-6e6f-744e-656564454649", Offset: mib, Size: 3 * mib},
		sourcetest.Partition{Number: 15, Type: sourcetest.EFI, Offset: 4 * mib, Size: 124 * mib})
	if err != nil {
		return err
	}
	return tool("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, path)
}

func tool(args ...string) error {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", args[0], err, out)
	}
	return nil
}

// initrd makes an initial RAM disk of the modules in a root disk: an archive
// before it, as for microcode, and the rest compressed.
func initrd(path, root string) error {
	tree, err := os.MkdirTemp(filepath.Dir(path), "modules")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tree)
	if err := tool("debugfs", "-R", "rdump /usr/lib/modules "+tree, root); err != nil {
		return err
	}
	records := []cpio.Record{}
	err = filepath.WalkDir(tree, func(name string, entry os.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(name)
		below, _ := filepath.Rel(tree, name) // it is below
		records = append(records, cpio.StaticFile(filepath.Join("usr/lib", below), string(data), 0o644))
		return err
	})
	if err != nil {
		return err
	}
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer out.Close()
	write := func(w io.Writer, records ...cpio.Record) error {
		archive := cpio.Newc.Writer(w)
		for _, r := range records {
			if err := archive.WriteRecord(r); err != nil {
				return err
			}
		}
		return cpio.WriteTrailer(archive)
	}
	if err := write(out, cpio.StaticFile("kernel/x86/microcode/none.bin", "none", 0o644)); err != nil {
		return err
	}
	z := gzip.NewWriter(out)
	if err := errors.Join(write(z, records...), z.Close()); err != nil {
		return err
	}
	return out.Close()
}
