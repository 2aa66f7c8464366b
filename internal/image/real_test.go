package image_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image"
)

// realConfig is for builds from Debian's packages, which take a mirror, a GiB
// and one to three minutes each: only where HOLDPOINT_TEST_IMAGE names a folder
// for the images (images/), the packages (cache/) and the logs (log/).
func realConfig(t *testing.T) image.BuildConfig {
	t.Helper()
	home := os.Getenv("HOLDPOINT_TEST_IMAGE")
	if home == "" {
		t.Skip("HOLDPOINT_TEST_IMAGE is not set")
	}
	temp, err := os.MkdirTemp("/var/tmp", "holdpoint-test-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(temp, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// What a build leaves behind is a failure, and maybe not ours to remove.
		if err := os.Remove(temp); err != nil {
			t.Error(err)
		}
	})
	cfg := image.BuildConfig{
		ImagesDir: filepath.Join(home, "images"), CacheDir: filepath.Join(home, "cache"), LogDir: filepath.Join(home, "log"),
		TempDir: temp,
	}
	for _, dir := range []string{cfg.ImagesDir, cfg.CacheDir, cfg.LogDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return cfg
}

func TestBuildDebian(t *testing.T) {
	cfg := realConfig(t)
	// A package whose program has file capabilities, which unpacking loses easily.
	cfg.Packages = []string{"iputils-ping"}
	cfg.Script = "set -e\ntest \"$(id -u)\" = 0\necho made >/etc/made-by-script\n"
	last := ""
	img, err := image.Build(t.Context(), cfg, func(p image.Progress) {
		if p.Phase != last {
			last = p.Phase
			t.Log(p.Phase)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	opened, err := image.Open(img.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := opened.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	boot, err := opened.BootInitramfs(t.Context(), cfg.CacheDir)
	if err != nil && !errdefs.Is(err, errdefs.Unsupported) {
		t.Error(err)
	}
	t.Logf("image %s, kernel %s, boot initramfs %s", opened.Dir, opened.KernelVersion, boot)
	for _, want := range []string{"nginx", "iputils-ping", "kmod"} {
		if !slices.Contains(opened.Packages, want) {
			t.Errorf("the manifest has no package %s: %v", want, opened.Packages)
		}
	}
}

func TestBuildDebianRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*image.BuildConfig)
		says   string
	}{
		"package": {func(cfg *image.BuildConfig) { cfg.Packages = []string{"no-such-package-at-all"} }, "Unable to locate package no-such-package-at-all"},
		"script":  {func(cfg *image.BuildConfig) { cfg.Script = "#!/usr/bin/python3\nraise SystemExit(7)\n" }, "the script ended with exit code 7"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := realConfig(t)
			c.change(&cfg)
			_, err := image.Build(t.Context(), cfg, nil)
			if !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), cfg.LogDir) {
				t.Errorf("%v; want INVALID with %q and the log", err, c.says)
			}
		})
	}
}

// TestBuildDebianCanceled: a canceled build leaves no file, process or mount;
// realConfig's clean-up looks for files.
func TestBuildDebianCanceled(t *testing.T) {
	for _, phase := range []string{"running apt-get update", "extracting archives", "installing essential packages", "installing remaining packages inside the chroot"} {
		t.Run(phase, func(t *testing.T) {
			cfg := realConfig(t)
			cfg.Fresh = true
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			_, err := image.Build(ctx, cfg, func(p image.Progress) {
				if p.Phase == phase {
					cancel()
				}
			})
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%v, want that of the cancellation", err)
			}
			mounts, err := os.ReadFile("/proc/self/mountinfo")
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(mounts), cfg.TempDir) {
				t.Errorf("mounts below %s are left", cfg.TempDir)
			}
			procs, err := filepath.Glob("/proc/[0-9]*/environ")
			if err != nil {
				t.Fatal(err)
			}
			for _, proc := range procs {
				if env, err := os.ReadFile(proc); err == nil && strings.Contains(string(env), cfg.TempDir) {
					t.Errorf("%s is left", filepath.Dir(proc))
				}
			}
		})
	}
}
