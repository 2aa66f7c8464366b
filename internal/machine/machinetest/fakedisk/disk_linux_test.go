package fakedisk_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakedisk"
)

// chain makes n empty layers over an empty bottom.
func chain(t *testing.T, n int) []string {
	t.Helper()
	dir := t.TempDir()
	bottom := filepath.Join(dir, "bottom.img")
	must(t, os.WriteFile(bottom, make([]byte, 100), 0o600))
	paths := []string{bottom}
	for i := range n {
		path := filepath.Join(dir, string(rune('a'+i)))
		must(t, fakedisk.Create(path, 1<<30))
		paths = append(paths, path)
	}
	return paths
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func load(t *testing.T, paths ...string) *fakedisk.Disk {
	t.Helper()
	d := &fakedisk.Disk{Root: filepath.Join(t.TempDir(), "root"), Memory: []string{"run", "dev/shm"}}
	must(t, d.Load(paths))
	return d
}

func write(t *testing.T, d *fakedisk.Disk, name, content string) {
	t.Helper()
	path := filepath.Join(d.Root, name)
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(t, os.WriteFile(path, []byte(content), 0o644))
}

func check(t *testing.T, d *fakedisk.Disk, name, want string) {
	t.Helper()
	got, err := os.ReadFile(filepath.Join(d.Root, name))
	if errors.Is(err, fs.ErrNotExist) {
		got = []byte("absent")
	} else if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s is %q, want %q", name, got, want)
	}
}

func TestLayersGiveBackWhatWasThere(t *testing.T) {
	c := chain(t, 2)
	d := load(t, c[0], c[1])
	write(t, d, "kept", "1")
	write(t, d, "changed", "old")
	write(t, d, "dir/removed", "1")
	write(t, d, "becomes-dir", "1")
	write(t, d, "run/memory", "1")
	must(t, os.Symlink("kept", filepath.Join(d.Root, "link")))
	must(t, os.Chmod(filepath.Join(d.Root, "kept"), 0o600))
	when := time.Unix(1700000000, 0)
	must(t, os.Chtimes(filepath.Join(d.Root, "kept"), when, when))
	must(t, d.Switch(c[2]))
	write(t, d, "changed", "new")
	must(t, os.RemoveAll(filepath.Join(d.Root, "dir")))
	must(t, os.Remove(filepath.Join(d.Root, "becomes-dir")))
	write(t, d, "becomes-dir/x", "2")
	must(t, d.Sync())
	write(t, d, "unsynced", "1")

	below := load(t, c[0], c[1])
	check(t, below, "kept", "1")
	check(t, below, "link", "1")
	check(t, below, "changed", "old")
	check(t, below, "dir/removed", "1")
	check(t, below, "becomes-dir", "1")
	check(t, below, "run/memory", "absent")
	info, err := os.Stat(filepath.Join(below.Root, "kept"))
	must(t, err)
	if info.Mode() != 0o600 || !info.ModTime().Equal(when) {
		t.Errorf("kept has mode %v and time %v", info.Mode(), info.ModTime())
	}

	all := load(t, c...)
	check(t, all, "kept", "1")
	check(t, all, "changed", "new")
	check(t, all, "dir/removed", "absent")
	check(t, all, "becomes-dir/x", "2")
	check(t, all, "unsynced", "absent")
}

func TestSameSizeRewriteAfterSyncIsSeen(t *testing.T) {
	c := chain(t, 1)
	d := load(t, c...)
	for i := range 50 {
		want := string(rune('A' + i))
		write(t, d, "f", want)
		must(t, d.Sync())
		check(t, load(t, c...), "f", want)
	}
}

func TestTornRecordIsIgnoredAndCutOff(t *testing.T) {
	c := chain(t, 1)
	d := load(t, c...)
	write(t, d, "first", "1")
	must(t, d.Sync())
	info, err := os.Stat(c[1])
	must(t, err)
	whole := info.Size()
	write(t, d, "second", "2")
	must(t, d.Sync())
	full, err := os.ReadFile(c[1])
	must(t, err)
	for cut := whole + 1; cut < int64(len(full)); cut += 7 {
		must(t, os.WriteFile(c[1], full[:cut], 0o600))
		d = load(t, c...)
		check(t, d, "first", "1")
		check(t, d, "second", "absent")
		write(t, d, "second", "2")
		must(t, d.Sync())
		check(t, load(t, c...), "second", "2")
	}
}

func TestSwitchRefusesWhatIsNoEmptyLayer(t *testing.T) {
	c := chain(t, 2)
	d := load(t, c[0], c[1])
	write(t, d, "f", "1")
	if err := d.Switch(c[0]); err == nil {
		t.Error("switched to a file that is no layer")
	}
	must(t, d.Sync())
	if err := d.Switch(c[1]); err == nil {
		t.Error("switched to a layer that is not empty")
	}
	write(t, d, "g", "1")
	must(t, d.Sync())
	check(t, load(t, c[0], c[1]), "g", "1")
}

func TestImageDisk(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "etc"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "etc/issue"), []byte("fake"), 0o644))
	path := filepath.Join(t.TempDir(), "root.img")
	must(t, fakedisk.WriteImage(path, dir, 1<<30))
	top := chain(t, 1)[1]
	d := load(t, path, top)
	check(t, d, "etc/issue", "fake")
	must(t, os.Remove(filepath.Join(d.Root, "etc/issue")))
	must(t, d.Sync())
	check(t, load(t, path, top), "etc/issue", "absent")
	check(t, load(t, path, chain(t, 1)[1]), "etc/issue", "fake")
}
