package image

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestOpen(t *testing.T) {
	img := testImage(t)
	manifest := filepath.Join(img.Dir, manifestFile)
	good, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, old, new string
		want           errdefs.Kind
		says           string
	}{
		{"unknown version", `"version": 1`, `"version": 3`, errdefs.Incompatible, "upgrade holdpoint"},
		{"unknown field", `"version": 1,`, `"version": 1, "more": 1,`, errdefs.Invalid, "build it again"},
		{"another digest", `"sha256": "` + img.Manifest.Kernel.SHA256[:4], `"sha256": "0000`, errdefs.Invalid, "build id"},
		{"another architecture", `"x86_64"`, `"aarch64"`, errdefs.Invalid, "build id"},
		{"two disk sizes", `"disk_bytes": 1048576`, `"disk_bytes": 1048577`, errdefs.Invalid, "sizes differ"},
		{"no JSON", `{`, `[`, errdefs.Invalid, "manifest"},
		{"too long", `"version": 1,`, `"version": 1,` + strings.Repeat(" ", maxManifest), errdefs.Storage, "at most"},
	} {
		t.Run(c.name, func(t *testing.T) {
			bad := bytes.Replace(good, []byte(c.old), []byte(c.new), 1)
			if bytes.Equal(bad, good) {
				t.Fatalf("%q is not in the manifest", c.old)
			}
			if err := os.WriteFile(manifest, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := Open(img.Dir)
			if !errdefs.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("Open: %v; want %s with %q", err, c.want, c.says)
			}
		})
	}
	if err := os.WriteFile(manifest, good, 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := Open(img.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(img, again); diff != "" {
		t.Error(diff)
	}
}

func TestOpenRefusesAnotherPlatform(t *testing.T) {
	img := testImage(t)
	m := img.Manifest
	m.Architecture = "aarch64"
	m.BuildID = m.buildID()
	dir := filepath.Join(t.TempDir(), m.BuildID)
	if err := os.Rename(img.Dir, dir); err != nil {
		t.Fatal(err)
	}
	data, err := m.encode()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, manifestFile), data, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = Open(dir)
	if !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "aarch64") || !strings.Contains(err.Error(), "x86_64") {
		t.Errorf("Open: %v; want UNSUPPORTED naming both architectures", err)
	}
}

func TestOpenMissingAndMisnamed(t *testing.T) {
	if _, err := Open(filepath.Join(t.TempDir(), "nothing")); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("Open of nothing: %v, want NOT_FOUND", err)
	}
	img := testImage(t)
	other := filepath.Join(filepath.Dir(img.Dir), strings.Repeat("0", 32))
	if err := os.Rename(img.Dir, other); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(other); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("Open under another id: %v, want INVALID", err)
	}
}

func FuzzParseManifest(f *testing.F) {
	f.Add([]byte(`{"version":1}`))
	f.Add([]byte(`{"version":1,"build_id":"","kernel":{"size":-1}}`))
	m := Manifest{Version: 1, Architecture: Architecture, DiskBytes: 5}
	a := Asset{Size: 5, SHA256: strings.Repeat("ab", 32)}
	m.Kernel, m.Initramfs, m.Root = a, a, a
	m.BuildID = m.buildID()
	good, err := m.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := parseManifest(data)
		if err != nil {
			if kind := errdefs.KindOf(err); kind == errdefs.Internal {
				t.Errorf("an error without a kind: %v", err)
			}
			return
		}
		if m.Version != plainVersion || m.BuildID != m.buildID() || m.Root.Size != m.DiskBytes || len(data) > maxManifest {
			t.Errorf("accepted %q", data)
		}
		again, err := m.encode()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := parseManifest(again); err != nil && len(again) <= maxManifest {
			t.Errorf("what was accepted is refused when written again: %v", err)
		}
	})
}
