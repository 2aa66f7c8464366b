package kernel

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/source/sourcetest"
)

func TestVersion(t *testing.T) {
	if v, err := Version(sourcetest.Kernel("6.1.0-9-amd64")); err != nil || v != "6.1.0-9-amd64" {
		t.Errorf("%q, %v", v, err)
	}
	for _, bad := range [][]byte{nil, make([]byte, 4096), sourcetest.Kernel("../../etc"), sourcetest.Kernel(""), sourcetest.Kernel("6.1")[:0x260]} {
		if v, err := Version(bad); err == nil {
			t.Errorf("version %q of no kernel", v)
		}
	}
}

func TestNewest(t *testing.T) {
	got := Newest([]string{"6.1.0-9-amd64", "6.1.0-10-amd64", "5.10.0-30", "6.1.0-10-cloud-amd64", "..", "a b", "6.12.5+deb13", "6.012.5"})
	want := []string{"6.12.5+deb13", "6.012.5", "6.1.0-10-cloud-amd64", "6.1.0-10-amd64", "6.1.0-9-amd64", "5.10.0-30"}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// memory is a Folder of files in memory.
type memory map[string]string

func (m memory) ReadFiles(_ context.Context, names []string, _ int64) (map[string][]byte, error) {
	found := map[string][]byte{}
	for _, name := range names {
		if data, ok := m[name]; ok {
			found[name] = []byte(data)
		}
	}
	return found, nil
}

// compressors make the content of a compressed module, by its suffix.
func compressors(t *testing.T) map[string]func(string) string {
	return map[string]func(string) string{
		"": nil,
		".gz": func(s string) string {
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			if _, err := z.Write([]byte(s)); err != nil || z.Close() != nil {
				t.Fatal(err)
			}
			return b.String()
		},
		".zst": func(s string) string {
			z, err := zstd.NewWriter(nil)
			if err != nil {
				t.Fatal(err)
			}
			return string(z.EncodeAll([]byte(s), nil))
		},
		".xz": func(s string) string {
			cmd := exec.Command("xz", "-c")
			cmd.Stdin = strings.NewReader(s)
			out, err := cmd.Output()
			if err != nil {
				t.Skip("xz is not installed")
			}
			return string(out)
		},
	}
}

func files(prefix, suffix string, pack func(string) string) memory {
	m := memory{}
	for name, content := range sourcetest.Modules("m", suffix, pack) {
		m[prefix+strings.TrimPrefix(name, "m/")] = content
	}
	return m
}

func checkModules(t *testing.T, modules []Module) {
	t.Helper()
	var names []string
	for _, m := range modules {
		names = append(names, m.Name)
		if string(m.Data) != "\x7fELF module "+m.Name {
			t.Errorf("module %s is %q", m.Name, m.Data)
		}
	}
	want := []string{"crc16", "jbd2", "ext4", "virtio_ring", "virtio", "virtio_pci", "virtio_blk", "virtio_console"}
	if !slices.Equal(names, want) {
		t.Errorf("modules %v, want %v", names, want)
	}
}

func TestModules(t *testing.T) {
	for suffix, pack := range compressors(t) {
		t.Run("plain"+suffix, func(t *testing.T) {
			modules, err := Modules(t.Context(), files("", suffix, pack), "6.1")
			if err != nil {
				t.Fatal(err)
			}
			checkModules(t, modules)
		})
	}
}

func TestModulesRefusals(t *testing.T) {
	with := func(name, content string) memory {
		m := files("", "", nil)
		m[name] = content
		return m
	}
	chain := ""
	for i := range 100 {
		chain += fmt.Sprintf("m%d.ko: m%d.ko\n", i, i+1)
	}
	for name, c := range map[string]struct {
		from memory
		kind errdefs.Kind
		says string
	}{
		"no virtio": {with("modules.dep", "kernel/ext4.ko:\n"), errdefs.Unsupported, "virtio_ring"},
		"no ext4":   {with("modules.dep", "kernel/virtio.ko:\n"), errdefs.Unsupported, "ext4"},
		"missing":   {with("modules.dep", files("", "", nil)["modules.dep"]+"kernel/virtio_net.ko: gone.ko\n"), errdefs.Invalid, "gone.ko"},
		"no module": {with("kernel/virtio.ko", "hello"), errdefs.Invalid, "no module"},
		"too long":  {with("kernel/virtio.ko", "\x7fELF"+strings.Repeat("x", MaxModule)), errdefs.Invalid, "longer"},
		"many":      {with("modules.dep", files("", "", nil)["modules.dep"]+chain+"failover.ko: m0.ko\n"), errdefs.Unsupported, "64"},
		"circle":    {with("modules.dep", strings.Replace(files("", "", nil)["modules.dep"], "crc16.ko:", "crc16.ko: kernel/ext4.ko", 1)), "", ""},
	} {
		modules, err := Modules(t.Context(), c.from, "6.1")
		if c.kind == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if !errdefs.Is(err, c.kind) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %d modules, %v; want %v with %q", name, len(modules), err, c.kind, c.says)
		}
	}
	if _, err := Modules(t.Context(), memory{}, "6.1"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an empty folder: %v", err)
	}
}

// archive is a cpio archive of files.
func archive(files map[string]string) string {
	var b strings.Builder
	add := func(name, content string, mode int) {
		fmt.Fprintf(&b, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x", 1, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0)
		b.WriteString(name + "\x00" + strings.Repeat("\x00", -(110+len(name)+1)&3))
		b.WriteString(content + strings.Repeat("\x00", -len(content)&3))
	}
	for name, content := range files {
		add(name, content, 0o100644)
	}
	add("TRAILER!!!", "", 0)
	return b.String()
}

func initrd(t *testing.T, content string) Initrd {
	t.Helper()
	path := filepath.Join(t.TempDir(), "initrd")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return Initrd{File: f, Version: "6.1"}
}

// TestInitrd: modules are found behind a microcode archive, however the rest is
// compressed.
func TestInitrd(t *testing.T) {
	early := archive(map[string]string{"kernel/x86/microcode/x.bin": "odd"}) + strings.Repeat("\x00", 512)
	for suffix, pack := range compressors(t) {
		t.Run("plain"+suffix, func(t *testing.T) {
			content := archive(files("usr/lib/modules/6.1/", ".xz", compressors(t)[".xz"]))
			if pack != nil {
				content = pack(content)
			}
			modules, err := Modules(t.Context(), initrd(t, early+content), "6.1")
			if err != nil {
				t.Fatal(err)
			}
			checkModules(t, modules)
		})
	}
	if _, err := Modules(t.Context(), initrd(t, archive(nil)), "6.1"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("one without modules: %v", err)
	}
	gz := compressors(t)[".gz"]
	good := archive(map[string]string{"lib/modules/6.1/modules.dep": "x"})
	for name, content := range map[string]string{
		"text": "hello, world", "cut": good[:len(good)-8], "short": "0707", "lz4": "\x02\x21\x4c\x18xxxx", "twice": gz(gz(good)),
		"gzip": "\x1f\x8b\x00\x00\x00\x00\x00", "xz": "\xfd7zXZ\x00 nothing of it", "name": strings.Replace(good, "0000001c00000000lib", "fffffff000000000lib", 1),
		"size": strings.Replace(good, "00000001000000000000000000000000000000000000001c", "ffffffff000000000000000000000000000000000000001c", 1),
	} {
		if _, err := Modules(t.Context(), initrd(t, content), "6.1"); !errdefs.Is(err, errdefs.Invalid) && !errdefs.Is(err, errdefs.Unsupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzInitrd: whatever is in an archive, reading it ends, and what is taken is
// not longer than asked for.
func FuzzInitrd(f *testing.F) {
	good := archive(map[string]string{"lib/modules/6.1/modules.dep": "x: y", "etc/passwd": "me"})
	var gz bytes.Buffer
	z := gzip.NewWriter(&gz)
	_, _ = z.Write([]byte(good))
	_ = z.Close()
	f.Add([]byte(good))
	f.Add(append([]byte(good+"\x00\x00\x00\x00"), gz.Bytes()...))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		if bytes.Contains(data, []byte("\xfd7zXZ")) {
			return // a process each time is too slow
		}
		path := filepath.Join(dir, fmt.Sprint(os.Getpid()))
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		found, err := Initrd{File: file, Version: "6.1"}.ReadFiles(t.Context(), []string{"modules.dep"}, 16)
		if err == nil && len(found["modules.dep"]) > 16 {
			t.Errorf("%d bytes", len(found["modules.dep"]))
		}
	})
}

// FuzzResolve: whatever modules.dep says, resolving it ends, with few paths that
// stay below the folder.
func FuzzResolve(f *testing.F) {
	f.Add([]byte(files("", "", nil)["modules.dep"]))
	f.Add([]byte("a/ext4.ko: ../../etc/x.ko a/ext4.ko\n"))
	f.Fuzz(func(t *testing.T, dep []byte) {
		builtin := []string{"ext4", "virtio", "virtio_ring", "virtio_pci", "virtio_blk", "virtio_console"}
		order, err := resolve(dep, builtin, "6.1")
		if err == nil && len(order) > maxModules {
			t.Errorf("%d modules", len(order))
		}
		for _, p := range order {
			if !filepath.IsLocal(p) {
				t.Errorf("path %q", p)
			}
		}
	})
}

// FuzzVersion: a version is safe as the name of a folder.
func FuzzVersion(f *testing.F) {
	f.Add(uint16(0x60), []byte("6.1.0-9-amd64 (me)"))
	f.Add(uint16(0xffff), []byte("6.1"))
	f.Add(uint16(0x60), []byte("../6.1"))
	f.Fuzz(func(t *testing.T, at uint16, text []byte) {
		image := sourcetest.Kernel("")[:0x260]
		binary.LittleEndian.PutUint16(image[0x20e:], at)
		image = append(image, text...)
		if v, err := Version(image); err == nil && (!filepath.IsLocal(v) || strings.ContainsAny(v, "/ \"\n")) {
			t.Errorf("version %q", v)
		}
	})
}
