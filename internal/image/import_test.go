package image

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
	"github.com/holdpoint/holdpoint/internal/image/source"
	"github.com/holdpoint/holdpoint/internal/image/source/sourcetest"
)

// importConfig imports a small bootable disk into an empty folder.
func importConfig(t *testing.T) ImportConfig {
	t.Helper()
	needTools(t)
	if err := source.Missing(); err != nil {
		t.Skip(err)
	}
	const version = "6.1.0-9-test"
	files := map[string]string{"etc/hostname": "cloud\n", "bin/sh": "a shell", "boot/vmlinuz-" + version: string(sourcetest.Kernel(version))}
	maps.Copy(files, sourcetest.Modules("lib/modules/"+version, "", nil))
	cfg := ImportConfig{Path: filepath.Join(t.TempDir(), "disk"), ImagesDir: filepath.Join(t.TempDir(), "images")}
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
	cfg := importConfig(t)
	img, notes, err := Import(t.Context(), cfg, nil)
	if err != nil || len(notes) != 0 {
		t.Fatalf("%q, %v", notes, err)
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
	if opened.KernelVersion != "6.1.0-9-test" || opened.DiskBytes != 33<<20 || opened.Recipe != Imported || opened.Dir != img.Dir {
		t.Errorf("manifest %+v", opened.Manifest)
	}
	for name, mode := range map[string]os.FileMode{".": 0o700, kernelFile: 0o400, initramfsFile: 0o400, rootFile: 0o400, manifestFile: 0o400} {
		if info, err := os.Stat(filepath.Join(img.Dir, name)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v; want mode %v", name, err, mode)
		}
	}
	boot, err := opened.bootInitramfs(t.Context(), filepath.Join(t.TempDir(), "cache"), strings.NewReader("agent"))
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(boot)
	if err != nil {
		t.Fatal(err)
	}
	files := unpackAll(t, data)
	if want := "/holdpoint/crc16.ko\n/holdpoint/jbd2.ko\n/holdpoint/ext4.ko\n/holdpoint/virtio_ring.ko\n"; !strings.HasPrefix(files["holdpoint/modules"], want) {
		t.Errorf("modules %q, want first %q", files["holdpoint/modules"], want)
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
	cfg := importConfig(t)
	var phases []string
	if _, _, err := Import(t.Context(), cfg, func(p Progress) {
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
		_, _, err := Import(ctx, cfg, func(p Progress) {
			if p.Phase == phase {
				cancel()
			}
		})
		cancel()
		if !errors.Is(err, context.Canceled) {
			t.Errorf("canceled when %s: %v", phase, err)
		}
	}
	for says, change := range map[string]func(*ImportConfig){
		"absolute":       func(c *ImportConfig) { c.Path = "disk" },
		"initrd":         func(c *ImportConfig) { c.Initrd = c.Path },
		"hexadecimal":    func(c *ImportConfig) { c.SHA256 = "abc" },
		"its sha256":     func(c *ImportConfig) { c.SHA256 = strings.Repeat("a", 64) },
		"no Linux":       func(c *ImportConfig) { c.Kernel = c.Path },
		"--partition":    func(c *ImportConfig) { c.Partition = 2 },
		"number, from 1": func(c *ImportConfig) { c.Partition = -1 },
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
	cfg := importConfig(t)
	cut := errors.New("power cut")
	stride := 1
	if testing.Short() {
		stride = 4
	}
	for k := 0; ; k += stride {
		home := testConfig(t)
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
		if err := Sweep(t.Context(), home); err != nil {
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
