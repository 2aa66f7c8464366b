package source

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/source/sourcetest"
)

const version = "6.1.0-9-test"

// needTools skips where what imports want is missing.
func needTools(t *testing.T) {
	t.Helper()
	for _, tool := range []string{"/usr/sbin/mkfs.ext4", "/usr/sbin/debugfs", "/usr/sbin/e2fsck", "qemu-img"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is missing", tool)
		}
	}
}

// disks makes files in a folder.
type disks struct {
	*testing.T
	dir string
}

func newDisks(t *testing.T) disks {
	t.Helper()
	needTools(t)
	return disks{t, t.TempDir()}
}

func (d disks) path(name string) string { return filepath.Join(d.dir, name) }

func (d disks) check(err error) {
	d.Helper()
	if err != nil {
		d.Fatal(err)
	}
}

// rootFiles are those of a root, with more.
func rootFiles(more map[string]string) map[string]string {
	files := map[string]string{"etc/hostname": "cloud\n", "usr/bin/sh": "a shell", "bin": "-> usr/bin", "lib": "-> usr/lib"}
	maps.Copy(files, more)
	return files
}

// bootable are those of a root with a kernel and its modules.
func bootable() map[string]string {
	files := rootFiles(sourcetest.Modules("usr/lib/modules/"+version, "", nil))
	files["boot/vmlinuz-"+version] = string(sourcetest.Kernel(version))
	return files
}

func (d disks) tree(name string, files map[string]string) string {
	d.Helper()
	d.check(sourcetest.WriteTree(d.path(name), 32*mib, files))
	return d.path(name)
}

// gpt makes a disk with an EFI partition 15 and these trees on partitions of
// their types, from 1 on.
func (d disks) gpt(name string, types []string, trees ...string) string {
	d.Helper()
	parts := []sourcetest.Partition{{Number: 15, Type: sourcetest.EFI, Offset: mib, Size: mib}}
	files := map[int]string{}
	at := int64(2 * mib)
	for i, tree := range trees {
		info, err := os.Stat(tree)
		d.check(err)
		parts = append(parts, sourcetest.Partition{Number: i + 1, Type: types[i], Name: filepath.Base(tree), Offset: at, Size: info.Size()})
		files[i+1] = tree
		at += info.Size()
	}
	d.check(sourcetest.WriteDisk(d.path(name), at+mib, files, parts...))
	return d.path(name)
}

func (d disks) img(args ...string) {
	d.Helper()
	if out, err := exec.Command("qemu-img", args...).CombinedOutput(); err != nil {
		d.Fatalf("qemu-img %v: %v: %s", args, err, out)
	}
}

// extract extracts, and looks whether the original is as it was.
func (d disks) extract(cfg Config) (Root, error) {
	d.Helper()
	before, _ := os.ReadFile(cfg.Path)
	cfg.Work = d.TempDir()
	if cfg.Report == nil {
		cfg.Report = func(string, int64, int64) {}
	}
	root, err := Extract(d.Context(), cfg)
	if after, _ := os.ReadFile(cfg.Path); string(after) != string(before) {
		d.Errorf("%s was written to", cfg.Path)
	}
	return root, err
}

func TestExtract(t *testing.T) {
	d := newDisks(t)
	root := d.tree("root", bootable())
	data := d.tree("data", map[string]string{"etc/only": "no shell", "pgdata/x": "y"})
	disk := d.gpt("disk.raw", []string{sourcetest.Linux, sourcetest.Root}, data, root)
	d.img("convert", "-O", "qcow2", disk, d.path("plain.qcow2"))
	d.img("convert", "-O", "qcow2", "-c", disk, d.path("packed.qcow2"))
	d.img("convert", "-O", "qcow2", "-c", "-o", "compression_type=zstd", disk, d.path("zstd.qcow2"))
	d.img("convert", "-O", "qcow2", "-o", "compat=0.10,cluster_size=2M", disk, d.path("old.qcow2"))
	d.img("convert", "-O", "qcow2", "-o", "extended_l2=on,cluster_size=128k", root, d.path("a ?=:,\"'b.qcow2"))
	for _, name := range []string{"root", "disk.raw", "plain.qcow2", "packed.qcow2", "zstd.qcow2", "old.qcow2", "a ?=:,\"'b.qcow2"} {
		t.Run(name, func(t *testing.T) {
			d := disks{t, d.dir}
			data, err := os.ReadFile(d.path(name))
			d.check(err)
			sum := sha256.Sum256(data)
			phases := map[string]bool{}
			root, err := d.extract(Config{
				Path: d.path(name), SHA256: strings.ToUpper(hex.EncodeToString(sum[:])),
				Report: func(phase string, done, total int64) {
					phases[phase] = true
					if done < 0 || total != 0 && done > total {
						t.Errorf("%s: %d of %d", phase, done, total)
					}
				},
			})
			d.check(err)
			want, err := os.ReadFile(d.path("root"))
			d.check(err)
			got, err := os.ReadFile(root.Path)
			d.check(err)
			if string(got) != string(want) {
				t.Error("the root is not what was put in")
			}
			if len(root.Notes) != 0 || len(phases) < 4 {
				t.Errorf("notes %q, phases %v", root.Notes, phases)
			}
			boot, err := root.Boot(t.Context())
			d.check(err)
			if boot.Version != version || len(boot.Modules) != 8 || string(boot.Image) != string(sourcetest.Kernel(version)) {
				t.Errorf("kernel %s with %d modules", boot.Version, len(boot.Modules))
			}
		})
	}
}

// TestExtractRefusals: each says what is wrong, and with what.
func TestExtractRefusals(t *testing.T) {
	d := newDisks(t)
	root, data := d.tree("root", bootable()), d.tree("data", map[string]string{"x": "y"})
	write := func(name string, content []byte) string {
		d.check(os.WriteFile(d.path(name), content, 0o600))
		return d.path(name)
	}
	changed := func(name, from string, change func(b []byte)) string {
		b, err := os.ReadFile(from)
		d.check(err)
		change(b)
		return write(name, b)
	}
	qcow2 := func(name string, args ...string) string {
		d.img(append(append([]string{"create", "-q", "-f", "qcow2"}, args...), d.path(name), "32M")...)
		return d.path(name)
	}
	linux := []string{sourcetest.Linux, sourcetest.Linux}
	two := d.gpt("two", linux, root, d.tree("other", bootable()))
	many := slices.Repeat([]string{sourcetest.Linux}, 9)
	small := d.path("small")
	d.check(sourcetest.WriteTree(small, mib, map[string]string{"x": "y"}))
	for name, c := range map[string]struct {
		cfg  Config
		kind errdefs.Kind
		says string
	}{
		"missing":     {Config{Path: d.path("none")}, errdefs.NotFound, "none: there is no such file"},
		"folder":      {Config{Path: d.dir}, errdefs.Invalid, "no regular file"},
		"device":      {Config{Path: "/dev/null"}, errdefs.Invalid, "no regular file"},
		"empty":       {Config{Path: write("empty", nil)}, errdefs.Invalid, "too short"},
		"zeros":       {Config{Path: write("zeros", make([]byte, 4*mib))}, errdefs.Invalid, "neither a disk .* nor a container image .*docker save"},
		"xz":          {Config{Path: write("xz", []byte("\xfd7zXZ\x00 and more"))}, errdefs.Invalid, "unxz"},
		"digest":      {Config{Path: root, SHA256: strings.Repeat("0", 64)}, errdefs.Invalid, "sha256 is .* download"},
		"cut qcow2":   {Config{Path: write("cutqcow2", []byte("QFI\xfb\x00\x00\x00\x03 and"))}, errdefs.Invalid, "header is damaged"},
		"backing":     {Config{Path: qcow2("backed", "-F", "raw", "-b", root)}, errdefs.Invalid, "names the backing file"},
		"data file":   {Config{Path: qcow2("outside", "-o", "data_file="+d.path("outside.raw"))}, errdefs.Invalid, "data is in another file"},
		"encrypted":   {Config{Path: qcow2("secret", "--object", "secret,id=s,data=x", "-o", "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10")}, errdefs.Invalid, "encrypted"},
		"huge":        {Config{Path: changed("huge", qcow2("hugebase"), func(b []byte) { binary.BigEndian.PutUint64(b[24:], 1<<49) })}, errdefs.Invalid, "at most 2048"},
		"bad tables":  {Config{Path: changed("tables", qcow2("tablesbase"), func(b []byte) { binary.BigEndian.PutUint64(b[48:], 1<<40) })}, errdefs.Invalid, "qemu-img"},
		"cut":         {Config{Path: changed("cut", root, func(b []byte) { binary.LittleEndian.PutUint32(b[1024+4:], 1<<30) })}, errdefs.Invalid, "larger than"},
		"no root":     {Config{Path: d.gpt("noroot", linux, data)}, errdefs.Invalid, `no ext4 file system.*partition 1 \("data"`},
		"no ext4":     {Config{Path: d.gpt("noext4", nil)}, errdefs.Invalid, "looked at: none"},
		"two":         {Config{Path: two}, errdefs.Invalid, `partition 1 \("root", 32 MiB\), partition 2 \("other".*--partition`},
		"wrong":       {Config{Path: two, Partition: 15}, errdefs.Invalid, "partition 15 is not"},
		"bare":        {Config{Path: root, Partition: 1}, errdefs.Invalid, "leave --partition out"},
		"many":        {Config{Path: d.gpt("many", many, slices.Repeat([]string{small}, 9)...)}, errdefs.Invalid, "9 ext4 partitions"},
		"damaged":     {Config{Path: changed("damaged", root, func(b []byte) { clear(b[1024+12 : 1024+16]) })}, errdefs.Invalid, "file system is damaged"},
		"bad journal": {Config{Path: changed("journal", root, func(b []byte) { clear(b[1024+224 : 1024+228]) })}, errdefs.Invalid, "another device"},
		"bad groups":  {Config{Path: changed("groups", root, func(b []byte) { clear(b[2048:8192]) })}, errdefs.Invalid, "groups"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := disks{t, d.dir}.extract(c.cfg)
			if !errdefs.Is(err, c.kind) || !regexp.MustCompile(c.says).MatchString(fmt.Sprint(err)) || strings.Contains(fmt.Sprint(err), "\n") {
				t.Errorf("%v; want %v and %q", err, c.kind, c.says)
			}
		})
	}
	chosen, err := d.extract(Config{Path: two, Partition: 2})
	d.check(err)
	if filepath.Base(chosen.Path) != "partition-2" {
		t.Errorf("partition 2 was chosen, and it is %s", chosen.Path)
	}
}

// TestJournalIsReplayed: a disk that was not unmounted is made sound, in the
// copy only, and that is said.
func TestJournalIsReplayed(t *testing.T) {
	d := newDisks(t)
	for name, c := range map[string]struct {
		requests []string
		says     string
	}{
		"clean":   {[]string{"feature needs_recovery"}, "journal was replayed in the image; the file"},
		"crashed": {[]string{"feature needs_recovery", "set_super_value free_blocks_count 5", "clri /etc/hostname"}, "replayed in the image, and e2fsck corrected [2-9]"},
		"unsafe":  {[]string{"set_super_value state 0"}, "journal was replayed"},
	} {
		root := d.tree(name, bootable())
		for _, request := range c.requests {
			if out, err := exec.Command("/usr/sbin/debugfs", "-w", "-R", request, root).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		got, err := d.extract(Config{Path: root})
		d.check(err)
		if len(got.Notes) != 1 || !regexp.MustCompile(c.says).MatchString(got.Notes[0]) {
			t.Errorf("%s: notes %q; want %q", name, got.Notes, c.says)
		}
		if out, err := exec.Command("/usr/sbin/e2fsck", "-fn", got.Path).CombinedOutput(); err != nil {
			t.Errorf("%s: e2fsck: %v: %s", name, err, out)
		}
	}
}

// TestHostileDisks: whatever a disk's metadata says, an import of it ends, and
// either gives a sound root with a kernel or one line that says what is wrong.
func TestHostileDisks(t *testing.T) {
	d := newDisks(t)
	root := d.tree("root", bootable())
	d.img("convert", "-O", "qcow2", root, d.path("root.qcow2"))
	rng := rand.New(rand.NewPCG(5, 6))
	for _, from := range []string{root, d.path("root.qcow2")} {
		good, err := os.ReadFile(from)
		d.check(err)
		// Behind the two superblocks' signatures there are tables only.
		for range 8 {
			bad := bytes.Clone(good)
			for range 40 {
				bad[rng.IntN(512<<10)] = byte(rng.IntN(256))
			}
			copy(bad[1024+56:], good[1024+56:1024+58])
			copy(bad, good[:32])
			d.check(os.WriteFile(d.path("bad"), bad, 0o600))
			got, err := d.extract(Config{Path: d.path("bad")})
			if err == nil {
				_, err = got.Boot(t.Context())
			}
			if err != nil && (errdefs.KindOf(err) == errdefs.Internal || strings.Contains(err.Error(), "\n")) {
				t.Errorf("%v", err)
			}
		}
	}
}

// TestKernels: the newest kernel that has its modules is taken, from wherever
// distributions keep it.
func TestKernels(t *testing.T) {
	d := newDisks(t)
	const newer = "6.1.0-10-test"
	separate := rootFiles(sourcetest.Modules("usr/lib/modules/"+version, ".xz", nil))
	delete(separate, "lib")
	for name, content := range separate {
		if strings.HasSuffix(name, ".ko.xz") {
			cmd := exec.Command("xz", "-c")
			cmd.Stdin = strings.NewReader(content)
			packed, err := cmd.Output()
			if err != nil {
				t.Skip("xz is missing")
			}
			separate[name] = string(packed)
		}
	}
	separate["lib"] = "-> /usr/lib"
	beside := rootFiles(sourcetest.Modules("usr/lib/modules/"+version, "", nil))
	beside["usr/lib/modules/"+version+"/vmlinuz"] = string(sourcetest.Kernel(version))
	several := bootable()
	several["boot/vmlinuz-6.1.0-8-test"] = string(sourcetest.Kernel("6.1.0-8-test"))
	several["boot/vmlinuz-"+newer] = string(sourcetest.Kernel(newer))
	several["usr/lib/modules/"+newer+"/modules.order"] = "" // its package was removed
	several["usr/lib/modules/we?ird name/x"] = ""
	boot := d.tree("boot", map[string]string{"vmlinuz-" + version: string(sourcetest.Kernel(version))})
	for name, path := range map[string]string{
		"separate": d.gpt("separate.raw", []string{sourcetest.Linux, sourcetest.Boot}, d.tree("separate", separate), boot),
		"beside":   d.tree("beside", beside), "several": d.tree("several", several),
	} {
		root, err := d.extract(Config{Path: path})
		d.check(err)
		got, err := root.Boot(t.Context())
		if err != nil || got.Version != version || len(got.Modules) != 8 {
			t.Errorf("%s: kernel %q with %d modules, %v", name, got.Version, len(got.Modules), err)
		}
	}
	lying, none := bootable(), rootFiles(nil)
	lying["boot/vmlinuz-"+version] = string(sourcetest.Kernel(newer))
	for says, files := range map[string]map[string]string{"it says that it is 6.1.0-10-test": lying, "no kernel in /boot": none} {
		root, err := d.extract(Config{Path: d.tree("bad", files)})
		d.check(err)
		if _, err := root.Boot(t.Context()); !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v; want %q", err, says)
		}
	}
	d.given(none)
}

// given gives kernels by hand.
func (d disks) given(none map[string]string) {
	root, err := d.extract(Config{Path: d.tree("none", none)})
	d.check(err)
	kernel := d.path("vmlinuz")
	d.check(os.WriteFile(kernel, sourcetest.Kernel(version), 0o600))
	got, err := root.BootWith(d.Context(), kernel, "")
	if err != nil || got.Version != version || len(got.Modules) != 0 || len(got.Notes) != 1 {
		d.Errorf("without modules: %+v, %v", got.Notes, err)
	}
	if _, err := root.BootWith(d.Context(), kernel, kernel); !errdefs.Is(err, errdefs.Unsupported) {
		d.Errorf("a kernel for an initrd: %v", err)
	}
	if _, err := root.BootWith(d.Context(), root.Path, ""); !errdefs.Is(err, errdefs.Invalid) {
		d.Errorf("a disk for a kernel: %v", err)
	}
	full, err := d.extract(Config{Path: d.tree("full", bootable())})
	d.check(err)
	if got, err = full.BootWith(d.Context(), kernel, ""); err != nil || len(got.Modules) != 8 || len(got.Notes) != 0 {
		d.Errorf("with the disk's modules: %d, %v", len(got.Modules), err)
	}
}

func TestExtractStopsAndHasLimits(t *testing.T) {
	d := newDisks(t)
	root := d.tree("root", bootable())
	for phase, sum := range map[string]string{
		"checking the file's sha256": strings.Repeat("0", 64), "looking at the file": "", "copying the disk": "", "checking the file system": "",
	} {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := Extract(ctx, Config{Path: root, SHA256: sum, Work: t.TempDir(), Report: func(p string, _, _ int64) {
			if p == phase {
				cancel()
			}
		}})
		cancel()
		if !errors.Is(err, context.Canceled) {
			t.Errorf("canceled when %s: %v", phase, err)
		}
	}
	x := extraction{Config: Config{Work: d.dir}, file: &file{stored: 1 << 60}}
	if err := x.checkSpace([]*candidate{{partition: partition{size: 1 << 60}}}); !errdefs.Is(err, errdefs.NoSpace) {
		t.Errorf("an EiB fits: %v", err)
	}
	f, err := open(root)
	d.check(err)
	defer f.Close()
	d.check(os.Truncate(root, 64*mib))
	if err := f.unchanged(); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("the file grew: %v", err)
	}
	long := Tree{d.tree("long", map[string]string{"boot/k": strings.Repeat("x", 2*mib)})}
	if _, err := long.ReadFile(t.Context(), "/boot/k", mib); !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), "longer") {
		t.Errorf("a long file: %v", err)
	}
	if _, err := long.ReadFile(t.Context(), "/boot/x\nquit", mib); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("an odd name: %v", err)
	}
}
