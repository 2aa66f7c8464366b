package image

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/holdpoint/holdpoint/internal/image/initramfs"
	"github.com/holdpoint/holdpoint/internal/image/kernel"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// unpackAll reads archives one after the other, as the kernel does.
func unpackAll(t *testing.T, data []byte) map[string]string {
	t.Helper()
	files := map[string]string{}
	for len(data) > 0 {
		r := cpio.Newc.Reader(bytes.NewReader(data))
		end := 0
		for {
			rec, err := r.ReadRecord()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			content, err := io.ReadAll(io.NewSectionReader(rec, 0, int64(rec.FileSize)))
			if err != nil {
				t.Fatal(err)
			}
			files[rec.Name] = string(content)
			end = int(rec.RecPos) + int(rec.RecLen)
		}
		i := bytes.Index(data[end:], []byte(cpio.Trailer))
		if i < 0 {
			t.Fatal("an archive has no end")
		}
		data = bytes.TrimLeft(data[end+i+len(cpio.Trailer):], "\x00")
	}
	return files
}

func TestInitramfsListsModulesInOrder(t *testing.T) {
	modules := map[string][]byte{}
	for _, name := range kernel.BootModules() {
		if name != "failover" { // as if built in
			modules[kernel.Key(name)] = []byte("module " + name)
		}
	}
	data, err := initramfs.Modules(found{modules: modules}.inOrder())
	if err != nil {
		t.Fatal(err)
	}
	files := unpackAll(t, data)
	var want []string
	for _, name := range kernel.BootModules() {
		if name == "failover" {
			continue
		}
		path := "holdpoint/" + name + ".ko"
		want = append(want, "/"+path)
		if files[path] != "module "+name {
			t.Errorf("%s is %q", path, files[path])
		}
	}
	if got := strings.Fields(files["holdpoint/modules"]); strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("modules %v, want %v", got, want)
	}
	again, err := initramfs.Modules(found{modules: modules}.inOrder())
	if err != nil || !bytes.Equal(data, again) {
		t.Errorf("the same modules gave another archive (%v)", err)
	}
}

func TestBootInitramfs(t *testing.T) {
	img, cache := testImage(t), filepath.Join(t.TempDir(), "cache")
	path, err := img.bootInitramfs(t.Context(), cache, strings.NewReader("agent one"))
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	files := unpackAll(t, data)
	if files["init"] != "agent one" || files["holdpoint/virtio.ko"] != "m" {
		t.Errorf("initramfs has %v", files)
	}
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if before.Mode().Perm() != 0o400 {
		t.Errorf("mode %v, want 0400", before.Mode())
	}
	again, err := img.bootInitramfs(t.Context(), cache, strings.NewReader("agent one"))
	if err != nil || again != path {
		t.Fatalf("second time: %s, %v", again, err)
	}
	after, err := os.Stat(path)
	if err != nil || !os.SameFile(before, after) {
		t.Errorf("the file was made again (%v)", err)
	}
	other, err := img.bootInitramfs(t.Context(), cache, strings.NewReader("agent two"))
	if err != nil || other == path {
		t.Errorf("another agent: %s, %v; want a file of its own", other, err)
	}
	// A file that is not whole is made again.
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 10); err != nil {
		t.Fatal(err)
	}
	if _, err := img.bootInitramfs(t.Context(), cache, strings.NewReader("agent one")); err != nil {
		t.Fatal(err)
	}
	if healed, err := os.ReadFile(path); err != nil || !bytes.Equal(healed, data) {
		t.Errorf("a short file was kept (%v)", err)
	}
}

func TestGuestAgentMissing(t *testing.T) {
	agent, err := guestAgent()
	if err == nil {
		magic := make([]byte, 4)
		if _, err := agent.ReadAt(magic, 0); err != nil || string(magic) != "\x7fELF" {
			t.Errorf("the embedded agent is no program: %q, %v", magic, err)
		}
		return
	}
	if !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "make") {
		t.Errorf("without an agent: %v; want UNSUPPORTED that names make", err)
	}
}

func TestRemove(t *testing.T) {
	img, cache := testImage(t), filepath.Join(t.TempDir(), "cache")
	images := filepath.Dir(img.Dir)
	boot, err := img.bootInitramfs(t.Context(), cache, strings.NewReader("agent"))
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(bootDir(cache), strings.Repeat("0", 32)+"-1")
	if err := os.WriteFile(other, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Remove(nil, images, cache, img.BuildID); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{img.Dir, boot} {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s is still there (%v)", path, err)
		}
	}
	if _, err := os.Lstat(other); err != nil {
		t.Errorf("another image's boot file: %v", err)
	}
	if err := Remove(nil, images, cache, img.BuildID); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("remove again: %v, want NOT_FOUND", err)
	}
	for _, id := range []string{"..", "", "../" + strings.Repeat("0", 29)} {
		if err := Remove(nil, images, cache, id); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("remove %q: %v, want INVALID", id, err)
		}
	}
}
