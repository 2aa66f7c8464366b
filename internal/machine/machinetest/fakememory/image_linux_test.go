package fakememory_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakememory"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// tree gives the modes and contents below a folder.
func tree(t *testing.T, root string) map[string]string {
	t.Helper()
	found := map[string]string{}
	must(t, filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		content := info.Mode().String()
		switch info.Mode().Type() {
		case 0:
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			content += string(data)
		case fs.ModeSymlink:
			link, err := os.Readlink(path)
			if err != nil {
				return err
			}
			content += link
		}
		found[path[len(root):]] = content
		return nil
	}))
	return found
}

func TestImageHoldsMemoryFileSystemsOnly(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"run/d", "tmp/inner", "etc"} {
		must(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	must(t, os.Chmod(root+"/tmp", 0o777|fs.ModeSticky))
	for name, content := range map[string]string{
		"run/empty": "", "run/d/small": "small", "tmp/inner/page": string(make([]byte, fakememory.PageSize)), "tmp/x": "x", "etc/disk": "disk",
	} {
		must(t, os.WriteFile(filepath.Join(root, name), []byte(content), 0o640))
	}
	must(t, os.Symlink("../nowhere", root+"/run/link"))
	must(t, unix.Mkfifo(root+"/run/fifo", 0o600))
	kept := fakememory.Kept{
		BootID: "b", Cmdline: "c", Configured: []byte{1}, Paths: []string{"run", "dev/shm", "tmp/inner", "tmp"}, Ran: 5,
	}
	image, err := fakememory.Encode(root, kept)
	must(t, err)
	path := filepath.Join(t.TempDir(), "memory")
	must(t, os.WriteFile(path, image, 0o400))
	want := tree(t, root)

	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	back, err := fakememory.Decode(f)
	must(t, err)
	if diff := cmp.Diff(kept, back.Kept()); diff != "" {
		t.Error(diff)
	}
	must(t, os.WriteFile(root+"/run/later", nil, 0o600))
	must(t, os.Remove(root+"/tmp/x"))
	must(t, back.Restore(root))
	if diff := cmp.Diff(want, tree(t, root)); diff != "" {
		t.Error(diff)
	}
	again, err := fakememory.Encode(root, kept)
	must(t, err)
	if !cmp.Equal(image, again) {
		t.Error("the same memory has two images")
	}
}
