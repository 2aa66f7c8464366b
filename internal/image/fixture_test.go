package image

import (
	"archive/tar"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/image/initramfs"
	"github.com/holdpoint/holdpoint/internal/image/kernel"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
	"github.com/holdpoint/holdpoint/internal/sparse"
)

// entry is one file of a fake tree.
type entry struct {
	name, content string
	mode          int64
	uid, gid      int
	kind          byte
	xattr         map[string]string
}

// bootable are the entries without which no image is made.
func bootable() []entry {
	all := []entry{
		{name: "./.holdpoint/", kind: tar.TypeDir, mode: 0o700},
		{name: "./.holdpoint/kernel", content: "a kernel", mode: 0o600},
		{name: "./.holdpoint/version", content: "6.1.0-test\n", mode: 0o600},
		{name: "./usr/lib/modules/6.1.0-test/modules.builtin", content: "kernel/drivers/net/virtio_net.ko\n", mode: 0o644},
	}
	for _, name := range kernel.BootModules() {
		if name != "virtio_net" {
			all = append(all, entry{name: "./usr/lib/modules/6.1.0-test/kernel/drivers/" + name + ".ko", content: "module " + name, mode: 0o644})
		}
	}
	return all
}

func writeTree(w io.Writer, entries []entry) error {
	tw := tar.NewWriter(w)
	for _, e := range entries {
		if e.kind == 0 {
			e.kind = tar.TypeReg
		}
		h := &tar.Header{Typeflag: e.kind, Name: e.name, Mode: e.mode, Uid: e.uid, Gid: e.gid, Size: int64(len(e.content)), ModTime: time.Unix(1700000000, 0), Format: tar.FormatPAX}
		if e.kind == tar.TypeChar {
			h.Devmajor, h.Devminor, h.Size = 1, 3, 0
		}
		for name, value := range e.xattr {
			h.PAXRecords = map[string]string{"SCHILY.xattr." + name: value}
		}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if h.Size > 0 {
			if _, err := io.WriteString(tw, e.content); err != nil {
				return err
			}
		}
	}
	return tw.Close()
}

// fakeRecipe makes the tree of its entries.
type fakeRecipe struct {
	entries []entry
	// made counts how often.
	made *int
	// hook, when set, is called with the work folder before the tree is written.
	hook func(ctx context.Context, work string) error
}

func (f fakeRecipe) Key() string { return "0123456789abcdef0123456789abcdef" }

func (f fakeRecipe) Bootstrap(ctx context.Context, tree io.Writer, work string, _ *recipe.Log) error {
	if f.made != nil {
		*f.made++
	}
	if f.hook != nil {
		if err := f.hook(ctx, work); err != nil {
			return err
		}
	}
	return writeTree(tree, f.entries)
}

// testConfig has all its folders in a temporary one; the smallest disk.
func testConfig(t *testing.T) BuildConfig {
	t.Helper()
	home := t.TempDir()
	cfg := BuildConfig{
		ImagesDir: filepath.Join(home, "images"), CacheDir: filepath.Join(home, "cache"), LogDir: filepath.Join(home, "log"),
		TempDir: filepath.Join(home, "tmp"), DiskBytes: MinDisk,
	}
	for _, dir := range []string{cfg.ImagesDir, cfg.CacheDir, cfg.LogDir, cfg.TempDir} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	// Work folders want a path that others may pass through.
	for dir := cfg.TempDir; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return cfg
}

func fakeBuild(cfg BuildConfig, r recipe.Recipe) *build {
	cfg = cfg.withDefaults()
	return &build{cfg: cfg, recipe: r, store: cfg.store(), manifest: Manifest{
		Version: plainVersion, Architecture: Architecture, Recipe: recipe.Name,
		Packages: []string{"nginx"}, DiskBytes: cfg.DiskBytes,
	}}
}

// testImage is a small image made without tools: its root disk is no file
// system.
func testImage(t *testing.T) Image {
	t.Helper()
	m := Manifest{
		Version: plainVersion, Architecture: Architecture, Recipe: recipe.Name, Packages: []string{"nginx"},
		KernelVersion: "6.1.0-test", CreatedAt: time.Unix(1700000000, 0).UTC(), DiskBytes: 1 << 20,
	}
	dir := t.TempDir()
	write := func(name, content string, size int64) Asset {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		digest := fileDigest
		if name == rootFile {
			digest = sparse.Digest
		}
		sum, err := digest(t.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		return Asset{Size: size, SHA256: sum}
	}
	archive, err := initramfs.Modules([]kernel.Module{{Name: "virtio", Data: []byte("m")}})
	if err != nil {
		t.Fatal(err)
	}
	m.Kernel = write(kernelFile, "kernel", 6)
	m.Initramfs = write(initramfsFile, string(archive), int64(len(archive)))
	m.Root = write(rootFile, strings.Repeat("root", 1000), m.DiskBytes)
	m.BuildID = m.buildID()
	data, err := m.encode()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, manifestFile), data, 0o600); err != nil {
		t.Fatal(err)
	}
	final := filepath.Join(t.TempDir(), m.BuildID)
	if err := os.Rename(dir, final); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil { // for TempDir's own clean-up
		t.Fatal(err)
	}
	img, err := Open(final)
	if err != nil {
		t.Fatal(err)
	}
	return img
}
