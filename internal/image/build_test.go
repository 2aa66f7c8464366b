package image

import (
	"archive/tar"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
)

// needTools skips where the tools that make root disks are missing.
func needTools(t *testing.T) {
	t.Helper()
	for _, r := range recipe.Requirements(t.Context()) {
		if (r.Name == "fakeroot" || r.Name == "mkfs.ext4") && !r.OK {
			t.Skipf("%s is missing: %s", r.Name, r.Fix)
		}
	}
}

// leftovers are the names in the images' and temporary folders.
func leftovers(t *testing.T, cfg BuildConfig) []string {
	t.Helper()
	var names []string
	for _, dir := range []string{cfg.ImagesDir, cfg.TempDir, filepath.Join(cfg.CacheDir, "trees")} {
		entries, err := os.ReadDir(dir)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
	}
	return names
}

func debugfs(t *testing.T, disk, command string) string {
	t.Helper()
	out, err := exec.Command("/usr/sbin/debugfs", "-R", command, disk).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// TestBuildKeepsOwnersModesDevices makes an image of a small tree, whoever runs
// the test, and looks into its root disk.
func TestBuildKeepsOwnersModesDevices(t *testing.T) {
	needTools(t)
	cfg := testConfig(t)
	entries := append(bootable(),
		entry{name: "./etc/", kind: tar.TypeDir, mode: 0o755},
		entry{name: "./etc/shadow", content: "secret", mode: 0o640, gid: 42},
		entry{name: "./etc/hidden", content: "x", mode: 0, uid: 7},
		entry{name: "./etc/private/", kind: tar.TypeDir, mode: 0, uid: 8},
		entry{name: "./etc/private/key", content: "k", mode: 0o044},
		entry{name: "./bin/su", content: "su", mode: 0o4755},
		entry{name: "./bin/ping", content: "ping", mode: 0o755, xattr: map[string]string{
			"security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		}},
		entry{name: "./dev/null", kind: tar.TypeChar, mode: 0o666},
	)
	img, err := fakeBuild(cfg, fakeRecipe{entries: entries}).run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	opened, err := Open(img.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := opened.readVerified().Files[rootFile]; !ok {
		t.Error("the first boot would read the whole root disk again")
	}
	if err := opened.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if opened.KernelVersion != "6.1.0-test" || opened.DiskBytes != MinDisk {
		t.Errorf("manifest %+v", opened.Manifest)
	}
	for path, want := range map[string][]string{
		"/etc/shadow":      {"Mode:  0640", "User:     0", "Group:    42"},
		"/etc/hidden":      {"Mode:  0000", "User:     7"},
		"/bin/su":          {"Mode:  04755"},
		"/etc/private":     {"Mode:  0000", "User:     8"},
		"/etc/private/key": {"Mode:  0044", "Size: 1"},
		"/bin/ping":        {"security.capability (20)"},
		"/dev/null":        {"Type: character special", "01:03"},
	} {
		got := debugfs(t, img.Root(), "stat "+path)
		for _, w := range want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: no %q in\n%s", path, w, got)
			}
		}
	}
	if got := debugfs(t, img.Root(), "stat /.holdpoint"); strings.Contains(got, "Inode:") {
		t.Error("the build's own folder is in the root disk")
	}
	if out, err := exec.Command("/usr/sbin/e2fsck", "-fn", img.Root()).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
	if stored, err := img.StoredBytes(); err != nil || stored > 24<<20 {
		t.Errorf("a nearly empty image takes %d bytes (%v): its zeros are not holes", stored, err)
	}
	for name, mode := range map[string]os.FileMode{".": 0o700, kernelFile: 0o400, initramfsFile: 0o400, rootFile: 0o400, manifestFile: 0o400} {
		if info, err := os.Stat(filepath.Join(img.Dir, name)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: mode %v, %v; want %v", name, info.Mode(), err, mode)
		}
	}
}

// TestBuildUsesKeptTree: the recipe runs again only when its tree is damaged or
// a fresh one is asked for.
func TestBuildUsesKeptTree(t *testing.T) {
	needTools(t)
	cfg := testConfig(t)
	made := 0
	r := fakeRecipe{entries: bootable(), made: &made}
	build := func(want int) {
		t.Helper()
		if _, err := fakeBuild(cfg, r).run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if made != want {
			t.Errorf("the recipe ran %d times, want %d", made, want)
		}
	}
	build(1)
	build(1)
	kept := filepath.Join(cfg.CacheDir, "trees", r.Key()+".tar.zst")
	data, err := os.ReadFile(kept)
	if err != nil {
		t.Fatal(err)
	}
	for i, damage := range [][]byte{data[:len(data)/2], nil, slices.Concat(data[:40], []byte{data[40] ^ 0xff}, data[41:])} {
		if err := os.WriteFile(kept, damage, 0o600); err != nil {
			t.Fatal(err)
		}
		build(2 + i)
	}
	cfg.Fresh = true
	build(5)
}

func TestBuildFailuresLeaveNothing(t *testing.T) {
	needTools(t)
	boom := errors.New("boom")
	for _, c := range []struct {
		name string
		r    fakeRecipe
		want errdefs.Kind
		kept bool // the tree itself was good
	}{
		{"the recipe fails", fakeRecipe{hook: func(context.Context, string) error { return boom }}, errdefs.Internal, false},
		{"no kernel", fakeRecipe{entries: []entry{{name: "./etc/passwd", content: "x", mode: 0o644}}}, errdefs.Invalid, true},
		{"a module is missing", fakeRecipe{entries: slices.DeleteFunc(bootable(), func(e entry) bool {
			return strings.HasSuffix(e.name, "/virtio_blk.ko")
		})}, errdefs.Unsupported, true},
		{"a tool fails", fakeRecipe{entries: append(bootable(), entry{name: "./etc", content: "a file", mode: 0o644}, entry{name: "./etc/passwd", content: "x", mode: 0o644})}, errdefs.Internal, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := testConfig(t)
			_, err := fakeBuild(cfg, c.r).run(t.Context())
			if !errdefs.Is(err, c.want) {
				t.Errorf("error %v (%s), want %s", err, errdefs.KindOf(err), c.want)
			}
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("error of several lines: %q", err)
			}
			left := leftovers(t, cfg)
			if c.kept {
				left = slices.DeleteFunc(left, func(n string) bool { return n == c.r.Key()+".tar.zst" })
			}
			if len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func TestBuildCanceled(t *testing.T) {
	needTools(t)
	for _, phase := range []string{"installing packages", "making the root disk", "computing digests"} {
		t.Run(phase, func(t *testing.T) {
			cfg := testConfig(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			// What cannot be compressed makes the tree long enough to be
			// canceled in the middle.
			r := fakeRecipe{entries: append(bootable(), entry{name: "./noise", content: noise(8 << 20), mode: 0o644})}
			b := fakeBuild(cfg, r)
			b.progress = func(p Progress) {
				if p.Phase == phase {
					cancel()
				}
			}
			if _, err := b.run(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("error %v, want that of the cancellation", err)
			}
			left := slices.DeleteFunc(leftovers(t, cfg), func(n string) bool { return n == r.Key()+".tar.zst" })
			if len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// TestBuildStoppedAtEveryStep ends a build before each of its steps on disk in
// turn, as a power cut would. There is never half an image, and Sweep removes
// the rest.
func TestBuildStoppedAtEveryStep(t *testing.T) {
	needTools(t)
	cut := errors.New("power cut")
	stride := 1
	if testing.Short() {
		stride = 4
	}
	for k := 0; ; k += stride {
		cfg := testConfig(t)
		steps := 0
		cfg.FS = &durable.FS{Before: func(durable.Step) error {
			if steps++; steps > k {
				return cut
			}
			return nil
		}}
		img, err := fakeBuild(cfg, fakeRecipe{entries: bootable()}).run(t.Context())
		if err == nil {
			if steps > k || k < 10 {
				t.Fatalf("a build of %d steps succeeded after %d", steps, k)
			}
			if _, err := Open(img.Dir); err != nil {
				t.Error(err)
			}
			return
		}
		if !errors.Is(err, cut) {
			t.Fatalf("step %d: %v", k, err)
		}
		cfg.FS = nil
		if err := Sweep(t.Context(), cfg); err != nil {
			t.Fatalf("step %d: %v", k, err)
		}
		for _, name := range leftovers(t, cfg) {
			if name == (fakeRecipe{}).Key()+".tar.zst" {
				continue
			}
			// A rename may have happened though its sync did not.
			img, err := Open(filepath.Join(cfg.ImagesDir, name))
			if err == nil {
				err = img.Check(t.Context())
			}
			if err != nil {
				t.Errorf("step %d: left behind %s: %v", k, name, err)
			}
		}
	}
}

func TestBuildRefuses(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  BuildConfig
	}{
		{"recipe", BuildConfig{Recipe: "arch"}},
		{"small disk", BuildConfig{DiskBytes: MinDisk - 1<<20}},
		{"odd disk", BuildConfig{DiskBytes: MinDisk + 1}},
		{"huge disk", BuildConfig{DiskBytes: 3 << 40}},
		{"long script", BuildConfig{Script: strings.Repeat("#", maxScript+1)}},
	} {
		if _, err := Build(t.Context(), c.cfg, nil); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v, want INVALID", c.name, err)
		}
	}
}

func TestNeedSpaceNamesBoth(t *testing.T) {
	dir := t.TempDir()
	err := needSpace(dir, 1<<60)
	if !errdefs.Is(err, errdefs.NoSpace) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "MiB are free") || !strings.Contains(err.Error(), "1099511627776 MiB are needed") {
		t.Errorf("needSpace: %v", err)
	}
}

func noise(n int) string {
	data := make([]byte, n)
	seed := uint32(1)
	for i := range data {
		seed = seed*1664525 + 1013904223
		data[i] = byte(seed >> 24)
	}
	return string(data)
}
