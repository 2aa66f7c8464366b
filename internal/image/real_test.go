package image_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/holdpoint/holdpoint/internal/image"
)

// TestBuildDebian builds a real image from Debian's packages, which takes a
// mirror, a GiB and one to three minutes: only where HOLDPOINT_TEST_IMAGE names
// a folder, which keeps the image (images/), the packages (cache/) and the logs.
func TestBuildDebian(t *testing.T) {
	home := os.Getenv("HOLDPOINT_TEST_IMAGE")
	if home == "" {
		t.Skip("HOLDPOINT_TEST_IMAGE is not set")
	}
	cfg := image.BuildConfig{
		ImagesDir: filepath.Join(home, "images"), CacheDir: filepath.Join(home, "cache"), LogDir: filepath.Join(home, "log"),
		// A package whose program has file capabilities, which unpacking loses easily.
		Packages: []string{"iputils-ping"},
		Script:   "set -e\ntest \"$(id -u)\" = 0\necho made >/etc/made-by-script\n",
	}
	for _, dir := range []string{cfg.ImagesDir, cfg.CacheDir, cfg.LogDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
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
	t.Logf("image %s, kernel %s", opened.BuildID, opened.KernelVersion)
}
