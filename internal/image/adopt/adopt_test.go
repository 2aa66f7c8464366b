package adopt

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/image/source"
	"github.com/holdpoint/holdpoint/internal/image/source/sourcetest"
)

// importConfig imports a small bootable disk into an empty folder.
func diskConfig(t *testing.T) Config {
	t.Helper()
	if err := source.Missing(); err != nil {
		t.Skip(err)
	}
	const version = "6.1.0-9-test"
	files := map[string]string{"etc/hostname": "cloud\n", "bin/sh": "a shell", "boot/vmlinuz-" + version: string(sourcetest.Kernel(version))}
	maps.Copy(files, sourcetest.Modules("lib/modules/"+version, "", nil))
	cfg := Config{Path: filepath.Join(t.TempDir(), "disk"), ImagesDir: filepath.Join(t.TempDir(), "images")}
	if err := os.Mkdir(cfg.ImagesDir, 0o700); err != nil {
		t.Fatal(err)
	}
	// Not whole MiB, as no image may be.
	if err := sourcetest.WriteTree(cfg.Path, 32<<20+4096, files); err != nil {
		t.Fatal(err)
	}
	return cfg
}

// TestImport: what was imported is an image like another, and importing it again
// gives the same one.
func TestImport(t *testing.T) {
	cfg := diskConfig(t)
	img, notes, err := Import(t.Context(), cfg, nil)
	if err != nil || len(notes) != 0 {
		t.Fatalf("%q, %v", notes, err)
	}
	opened, err := image.Open(img.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(img.Dir, "verified.json")); err != nil {
		t.Errorf("the first boot would read the whole root disk again: %v", err)
	}
	if err := opened.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if opened.KernelVersion != "6.1.0-9-test" || opened.DiskBytes != 33<<20 || opened.Recipe != Disk || opened.Dir != img.Dir {
		t.Errorf("manifest %+v", opened.Manifest)
	}
	for name, mode := range map[string]os.FileMode{".": 0o700, "kernel": 0o400, "initramfs": 0o400, "root.img": 0o400, "manifest.json": 0o400} {
		if info, err := os.Stat(filepath.Join(img.Dir, name)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v; want mode %v", name, err, mode)
		}
	}
	boot, err := opened.Boot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := "/holdpoint/crc16.ko\n/holdpoint/jbd2.ko\n/holdpoint/ext4.ko\n/holdpoint/virtio_ring.ko\n"; !strings.Contains(string(boot.Initramfs), want) {
		t.Errorf("no modules %q", want)
	}
	again, _, err := Import(t.Context(), cfg, nil)
	if err != nil || again.BuildID != img.BuildID || !again.CreatedAt.Equal(img.CreatedAt) {
		t.Errorf("imported again it is %s of %v, %v; was %s of %v", again.BuildID, again.CreatedAt, err, img.BuildID, img.CreatedAt)
	}
	if entries, err := os.ReadDir(cfg.ImagesDir); err != nil || len(entries) != 1 {
		t.Errorf("images %v, %v", entries, err)
	}
}

// TestImportLeavesNothing: neither one that is canceled nor one that is refused.
func TestImportLeavesNothing(t *testing.T) {
	cfg := diskConfig(t)
	var phases []string
	if _, _, err := Import(t.Context(), cfg, func(p image.Progress) {
		if len(phases) == 0 || phases[len(phases)-1] != p.Phase {
			phases = append(phases, p.Phase)
		}
	}); err != nil || len(phases) < 5 {
		t.Fatalf("phases %q, %v", phases, err)
	}
	cfg.ImagesDir = t.TempDir()
	if err := os.Chmod(cfg.ImagesDir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, phase := range phases {
		ctx, cancel := context.WithCancel(t.Context())
		_, _, err := Import(ctx, cfg, func(p image.Progress) {
			if p.Phase == phase {
				cancel()
			}
		})
		cancel()
		if !errors.Is(err, context.Canceled) {
			t.Errorf("canceled when %s: %v", phase, err)
		}
	}
	for says, change := range map[string]func(*Config){
		"absolute":       func(c *Config) { c.Path = "disk" },
		"initrd":         func(c *Config) { c.Initrd = c.Path },
		"hexadecimal":    func(c *Config) { c.SHA256 = "abc" },
		"its sha256":     func(c *Config) { c.SHA256 = strings.Repeat("a", 64) },
		"no Linux":       func(c *Config) { c.Kernel = c.Path },
		"--partition":    func(c *Config) { c.Partition = 2 },
		"number, from 1": func(c *Config) { c.Partition = -1 },
	} {
		bad := cfg
		change(&bad)
		if _, _, err := Import(t.Context(), bad, nil); !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v; want %q", err, says)
		}
	}
	if entries, err := os.ReadDir(cfg.ImagesDir); err != nil || len(entries) != 0 {
		t.Errorf("left are %v, %v", entries, err)
	}
}

// TestImportStoppedAtEveryStep ends an import before each of its steps on disk
// in turn, as a power cut would. There is never half an image, and Sweep removes
// the rest; the import can be done again.
func TestImportStoppedAtEveryStep(t *testing.T) {
	cfg := diskConfig(t)
	cut := errors.New("power cut")
	stride := 1
	if testing.Short() {
		stride = 4
	}
	for k := 0; ; k += stride {
		home := homeConfig(t)
		cfg.ImagesDir = home.ImagesDir
		steps := 0
		cfg.FS = &durable.FS{Before: func(durable.Step) error {
			if steps++; steps > k {
				return cut
			}
			return nil
		}}
		_, _, err := Import(t.Context(), cfg, nil)
		if err == nil {
			if steps > k || k < 10 {
				t.Fatalf("an import of %d steps succeeded after %d", steps, k)
			}
			return
		}
		if !errors.Is(err, cut) {
			t.Fatalf("step %d: %v", k, err)
		}
		if err := image.Sweep(t.Context(), home); err != nil {
			t.Fatalf("step %d: %v", k, err)
		}
		cfg.FS = nil
		img, _, err := Import(t.Context(), cfg, nil)
		if err == nil {
			err = img.Check(t.Context())
		}
		if err != nil {
			t.Errorf("step %d, and again: %v", k, err)
		}
		if entries, err := os.ReadDir(cfg.ImagesDir); err != nil || len(entries) != 1 {
			t.Errorf("step %d, and again: images %v, %v", k, entries, err)
		}
	}
}

// homeConfig has all folders of a home that Sweep looks into.
func homeConfig(t *testing.T) image.BuildConfig {
	t.Helper()
	home := t.TempDir()
	cfg := image.BuildConfig{ImagesDir: filepath.Join(home, "images"), CacheDir: filepath.Join(home, "cache"), TempDir: filepath.Join(home, "tmp")}
	for _, dir := range []string{cfg.ImagesDir, cfg.CacheDir, cfg.TempDir} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return cfg
}
