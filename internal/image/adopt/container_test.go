package adopt

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/image/kernel"
	"github.com/holdpoint/holdpoint/internal/image/source"
	"github.com/holdpoint/holdpoint/internal/image/source/sourcetest"
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
	"github.com/holdpoint/holdpoint/internal/oci/ocitest"
	"github.com/holdpoint/holdpoint/internal/undo"
)

// containerConfig imports into a folder with one image, whose kernel is taken.
func containerConfig(t *testing.T, path string) Config {
	t.Helper()
	if err := source.Missing(); err != nil {
		t.Skip(err)
	}
	cfg := Config{Path: path, ImagesDir: filepath.Join(t.TempDir(), "images")}
	if err := os.Mkdir(cfg.ImagesDir, 0o700); err != nil {
		t.Fatal(err)
	}
	var stack undo.Stack
	s, err := image.NewStage(nil, cfg.ImagesDir, image.Manifest{Recipe: "debian", Packages: []string{}}, &stack)
	if err != nil {
		t.Fatal(err)
	}
	boot, err := image.NewBoot("6.1.0-9-test", []byte("a kernel"), []kernel.Module{{Name: "virtio", Data: []byte("m")}})
	if err == nil {
		err = os.WriteFile(s.Root(), make([]byte, 1<<20), 0o600)
	}
	if err == nil {
		err = s.Fill(t.Context(), boot, defaults.Defaults{})
	}
	if err != nil {
		t.Fatal(err)
	}
	debian, err := s.Publish(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	stack.Release()
	cfg.KernelFrom = debian.Dir
	return cfg
}

// inDisk asks debugfs.
func inDisk(t *testing.T, img image.Image, request string) string {
	t.Helper()
	cmd := exec.Command("debugfs", "-R", request, img.Root())
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", request, err, out)
	}
	return string(out)
}

func said() ocitest.Object {
	return ocitest.Object{
		"User": "app", "Env": []string{"A=1", "PATH=/opt/bin:/bin"}, "WorkingDir": "/srv/app/data",
		"Entrypoint": []string{"/opt/bin/serve"}, "Cmd": []string{"--on", "80"},
	}
}

// layers has an account, a program that the second layer replaces, and a file
// that it removes.
func layers(t *testing.T) [][]byte {
	t.Helper()
	return [][]byte{
		ocitest.Layer(t, ocitest.Dir("etc"), ocitest.File("etc/passwd", "root:x:0:0::/root:/bin/sh\napp:x:7:8::/:/bin/sh\n"), ocitest.File("opt/bin/serve", "old"), ocitest.File("gone", "gone")),
		ocitest.Layer(t, ocitest.File("opt/bin/serve", "new"), ocitest.File(".wh.gone", "")),
	}
}

// TestImportContainer: the kernel is another image's, what the image says of
// programs is in the manifest and the build id, and the layers are the disk.
func TestImportContainer(t *testing.T) {
	for name, path := range map[string]string{
		"folder": ocitest.New(t, said(), ocitest.Gzip, layers(t)...).WriteDir(t),
		"tar":    ocitest.New(t, said(), ocitest.Zstd, layers(t)...).WriteTar(t),
		"older":  ocitest.Legacy(t, "a:1", said(), layers(t)...).WriteTar(t),
	} {
		t.Run(name, func(t *testing.T) {
			cfg := containerConfig(t, path)
			img, notes, err := Import(t.Context(), cfg, nil)
			if err != nil || len(notes) > 0 {
				t.Fatalf("%q, %v", notes, err)
			}
			if img, err = image.Open(img.Dir); err == nil {
				err = img.Check(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			want := defaults.Defaults{
				User: "app", Env: []string{"A=1", "PATH=/opt/bin:/bin"}, WorkingDir: "/srv/app/data", Command: []string{"/opt/bin/serve", "--on", "80"},
			}
			if diff := cmp.Diff(want, img.Defaults); diff != "" || img.Version != 2 || img.Recipe != Container || img.KernelVersion != "6.1.0-9-test" || img.DiskBytes != 1<<30+128<<20 {
				t.Errorf("%+v\n%s", img.Manifest, diff)
			}
			if text := inDisk(t, img, "cat /opt/bin/serve"); !strings.Contains(text, "new") {
				t.Errorf("the program is %q", text)
			}
			if text := inDisk(t, img, "ls /"); strings.Contains(text, "gone") {
				t.Errorf("what a layer removed is there: %s", text)
			}
			if text := inDisk(t, img, "stat /srv/app/data"); !strings.Contains(text, "Type: directory") {
				t.Errorf("the programs have no folder: %s", text)
			}
			kernels, err := os.ReadFile(img.Kernel())
			if err != nil || string(kernels) != "a kernel" {
				t.Errorf("the kernel is %q, %v", kernels, err)
			}
			if entries, err := os.ReadDir(cfg.ImagesDir); err != nil || len(entries) != 2 {
				t.Errorf("left are %v, %v", entries, err)
			}
		})
	}
}

// TestImportContainerWithKernel: a kernel that is given counts, and a size.
func TestImportContainerWithKernel(t *testing.T) {
	cfg := containerConfig(t, ocitest.New(t, ocitest.Object{}, nil, layers(t)...).WriteDir(t))
	cfg.KernelFrom, cfg.Kernel, cfg.DiskBytes = "", filepath.Join(t.TempDir(), "vmlinuz"), 2<<30+1<<20
	if err := os.WriteFile(cfg.Kernel, sourcetest.Kernel("6.1.0-8-own"), 0o600); err != nil {
		t.Fatal(err)
	}
	img, notes, err := Import(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	if img.KernelVersion != "6.1.0-8-own" || img.DiskBytes != 2<<30+1<<20 || img.Defaults.WorkingDir != "/" || len(notes) != 1 || !strings.Contains(notes[0], "built in") {
		t.Errorf("%+v, %q", img.Manifest, notes)
	}
}

// TestContainerLeavesNothing: what is hostile, does not fit or is canceled.
func TestContainerLeavesNothing(t *testing.T) {
	good := ocitest.New(t, said(), nil, layers(t)...).WriteTar(t)
	cfg := containerConfig(t, good)
	data, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(data)
	two := ocitest.Layout{}
	two.Index(t, ocitest.Tagged(two.Manifest(t, ocitest.ConfigOf(said(), layers(t)...), nil, layers(t)...), "a:1"),
		ocitest.Tagged(two.Manifest(t, ocitest.ConfigOf(ocitest.Object{}, layers(t)...), nil, layers(t)...), "b:2"))
	other := ocitest.ConfigOf(said(), layers(t)...)
	other["architecture"] = "arm64"
	arm := ocitest.Layout{}
	arm.Index(t, arm.Manifest(t, other, nil, layers(t)...))
	hostile := func(entries ...ocitest.Entry) string {
		return ocitest.New(t, said(), nil, layers(t)[0], ocitest.Layer(t, entries...)).WriteTar(t)
	}
	config := func(o ocitest.Object) string { return ocitest.New(t, o, nil, layers(t)...).WriteTar(t) }
	for says, change := range map[string]func(*Config){
		"holdpoint image build debian": func(c *Config) { c.KernelFrom = "" },
		"its sha256 is":                func(c *Config) { c.SHA256 = strings.Repeat("a", 64) },
		"has no sha256": func(c *Config) {
			c.Path, c.SHA256 = ocitest.New(t, said(), nil, layers(t)...).WriteDir(t), strings.Repeat("a", 64)
		},
		"no partitions":             func(c *Config) { c.Partition = 1 },
		"choose one with --tag":     func(c *Config) { c.Path = two.WriteTar(t) },
		`only "a:1, b:2"`:           func(c *Config) { c.Path, c.Tag = two.WriteTar(t), "c:3" },
		"linux/arm64":               func(c *Config) { c.Path = arm.WriteTar(t) },
		"from 1 GiB":                func(c *Config) { c.DiskBytes = 1 << 20 },
		"leads out":                 func(c *Config) { c.Path = hostile(ocitest.File("../../x", "x")) },
		"hard link":                 func(c *Config) { c.Path = hostile(ocitest.Link(tar.TypeLink, "x", "etc")) },
		"neither an oci-layout nor": func(c *Config) { c.Path = t.TempDir() },
		"/etc/passwd has none":      func(c *Config) { c.Path = config(ocitest.Object{"User": "nobody"}) },
		"is not NAME=value":         func(c *Config) { c.Path = config(ocitest.Object{"Env": []string{"A"}}) },
		"more than 32 KiB":          func(c *Config) { c.Path = config(ocitest.Object{"Env": []string{"A=" + strings.Repeat("x", 40<<10)}}) },
		"too much environment":      func(c *Config) { c.Path = config(ocitest.Object{"Env": []string{"A=" + strings.Repeat("<", 30<<10)}}) },
		"there is no such file":     func(c *Config) { c.Path += ".not" },
		"leave --tag and --size out": func(c *Config) {
			c.Path, c.Tag = c.KernelFrom+"/root.img", "a"
		},
	} {
		bad := cfg
		change(&bad)
		_, _, err := Import(t.Context(), bad, nil)
		if kind := errdefs.KindOf(err); err == nil || !strings.Contains(err.Error(), says) || kind == errdefs.Internal || kind == errdefs.Storage {
			t.Errorf("%v (%s); want %q", err, kind, says)
		}
	}
	cfg.SHA256 = hex.EncodeToString(sum[:])
	var phases []string
	img, _, err := Import(t.Context(), cfg, func(p image.Progress) {
		if len(phases) == 0 || phases[len(phases)-1] != p.Phase {
			phases = append(phases, p.Phase)
		}
	})
	if err != nil || len(phases) < 4 {
		t.Fatalf("phases %q, %v", phases, err)
	}
	if err := os.RemoveAll(img.Dir); err != nil {
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
	if entries, err := os.ReadDir(cfg.ImagesDir); err != nil || len(entries) != 1 {
		t.Errorf("left are %v, %v", entries, err)
	}
}
