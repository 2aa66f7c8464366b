//go:build linux

package identity

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func content(t *testing.T, parts ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(parts...))
	must(t, err)
	return string(b)
}

func TestCheck(t *testing.T) {
	id := strings.Repeat("0f", 16)
	for _, ok := range [][2]string{{"", ""}, {"web-1", id}, {strings.Repeat("a", 64), ""}} {
		must(t, Check(ok[0], ok[1]))
	}
	for _, bad := range [][2]string{{"a b", ""}, {"a/b", ""}, {"a\n", ""}, {strings.Repeat("a", 65), ""}, {"", id[1:]}, {"", "F" + id[1:]}, {"", id + "0"}} {
		if err := Check(bad[0], bad[1]); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// TestMachineIDStaysTheSameFile: who has the file open, or mounted elsewhere,
// sees the new id.
func TestMachineIDStaysTheSameFile(t *testing.T) {
	root := t.TempDir()
	old, next := strings.Repeat("1", 32), strings.Repeat("2", 32)
	writeFiles(t, root, "", old)
	name := filepath.Join(root, "etc/machine-id")
	must(t, os.Chmod(name, 0o444))
	seen, err := os.Open(name)
	must(t, err)
	defer seen.Close()
	writeFiles(t, root, "", next)
	var b [64]byte
	n, _ := seen.ReadAt(b[:], 0)
	if string(b[:n]) != next+"\n" || content(t, name) != next+"\n" {
		t.Errorf("an open file shows %q, the name %q", b[:n], content(t, name))
	}
}

// TestNamesAreWrittenInPlace: once the files hold a name, the next one makes no
// new files, be it longer or shorter, and what else is in them stays.
func TestNamesAreWrittenInPlace(t *testing.T) {
	root := t.TempDir()
	etc := filepath.Join(root, "etc")
	must(t, os.Mkdir(etc, 0o755))
	must(t, os.WriteFile(filepath.Join(etc, "hosts"), []byte("10.0.0.1 db\n"), 0o644))
	writeFiles(t, root, "web", "")
	same := map[string]os.FileInfo{}
	for _, name := range []string{"hosts", "hostname"} {
		fi, err := os.Stat(filepath.Join(etc, name))
		must(t, err)
		same[name] = fi
	}
	for _, name := range []string{"a-longer-name", "b", "c", ""} {
		writeFiles(t, root, name, "")
		if name == "" {
			name = "c" // it stays
		}
		for file, want := range map[string]string{"hosts": "10.0.0.1 db\n127.0.1.1 " + name + "\n", "hostname": name + "\n"} {
			if got := content(t, etc, file); got != want {
				t.Errorf("%s holds %q, want %q", file, got, want)
			}
			if fi, err := os.Stat(filepath.Join(etc, file)); err != nil || !os.SameFile(fi, same[file]) {
				t.Errorf("named %q, %s is another file, %v", name, file, err)
			}
		}
	}
}

func TestNamesAreReplacedWhole(t *testing.T) {
	root := t.TempDir()
	etc := filepath.Join(root, "etc")
	must(t, os.Mkdir(etc, 0o755))
	must(t, os.WriteFile(filepath.Join(etc, "hosts"), []byte("10.0.0.1 db\n127.0.1.1 old old.lan\n::1 localhost"), 0o600))
	must(t, os.WriteFile(filepath.Join(etc, "name"), []byte("old\n"), 0o644))
	must(t, os.Symlink("name", filepath.Join(etc, "hostname")))
	before, err := os.Open(filepath.Join(etc, "hosts"))
	must(t, err)
	defer before.Close()
	writeFiles(t, root, "longer", "")

	if got, want := content(t, etc, "hosts"), "10.0.0.1 db\n::1 localhost\n127.0.1.1 longer\n"; got != want {
		t.Errorf("hosts %q, want %q", got, want)
	}
	var b [8]byte
	if n, _ := before.ReadAt(b[:], 0); string(b[:n]) != "10.0.0.1" {
		t.Errorf("a reader of the old hosts sees %q", b[:n])
	}
	if fi, err := os.Stat(filepath.Join(etc, "hosts")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	if fi, err := os.Lstat(filepath.Join(etc, "hostname")); err != nil || !fi.Mode().IsRegular() || content(t, etc, "hostname") != "longer\n" || content(t, etc, "name") != "old\n" {
		t.Errorf("the link is %v, %v; it leads to what holds %q", fi.Mode(), err, content(t, etc, "name"))
	}
	list, err := os.ReadDir(etc)
	if err != nil || len(list) != 3 { // and the target of the link
		t.Errorf("left in /etc: %v, %v", list, err)
	}
}

// TestMisplacedFiles: what cannot name a machine is told, and keeps nothing else
// from being written.
func TestMisplacedFiles(t *testing.T) {
	root, id := t.TempDir(), strings.Repeat("1", 32)
	etc := filepath.Join(root, "etc")
	must(t, os.MkdirAll(filepath.Join(etc, "machine-id"), 0o755))
	must(t, os.WriteFile(filepath.Join(etc, "hosts"), nil, 0o600))
	must(t, os.Truncate(filepath.Join(etc, "hosts"), 1<<40))
	misplaced, err := WriteFiles(root, "web", id)
	if err != nil || !slices.Equal(misplaced, []string{"/etc/machine-id", "/etc/hosts"}) || content(t, etc, "hostname") != "web\n" {
		t.Errorf("misplaced %v, %v", misplaced, err)
	}
	must(t, os.RemoveAll(etc))
	must(t, os.WriteFile(etc, nil, 0o600))
	if misplaced, err = WriteFiles(root, "web", id); err != nil || len(misplaced) != 3 {
		t.Errorf("without a folder: misplaced %v, %v", misplaced, err)
	}
}

// TestNothingIsWrittenThrough: what a link leads to stays as it is, and a reader
// that waits for a writer keeps nobody waiting.
func TestNothingIsWrittenThrough(t *testing.T) {
	root, id := t.TempDir(), strings.Repeat("1", 32)
	etc, data := filepath.Join(root, "etc"), filepath.Join(root, "data")
	must(t, os.Mkdir(etc, 0o755))
	must(t, os.WriteFile(data, []byte("127.0.0.1 localhost\n10.0.0.1 db\n"), 0o600))
	must(t, os.Symlink(data, filepath.Join(etc, "machine-id")))
	must(t, os.Symlink(data, filepath.Join(etc, "hosts")))
	must(t, syscall.Mkfifo(filepath.Join(etc, "hostname"), 0o600))
	writeFiles(t, root, "web", id)
	if got := content(t, data); got != "127.0.0.1 localhost\n10.0.0.1 db\n" {
		t.Errorf("the file that links lead to holds %q", got)
	}
	for name, want := range map[string]string{
		"machine-id": id + "\n", "hostname": "web\n", "hosts": "127.0.0.1 localhost\n10.0.0.1 db\n127.0.1.1 web\n",
	} {
		fi, err := os.Lstat(filepath.Join(etc, name))
		if err != nil || !fi.Mode().IsRegular() || content(t, etc, name) != want {
			t.Errorf("%s is %v, %v, and holds %q", name, fi.Mode(), err, content(t, etc, name))
		}
	}
	// One that leads to itself, and one to a device without an end.
	must(t, os.Remove(filepath.Join(etc, "hosts")))
	must(t, os.Symlink("hosts", filepath.Join(etc, "hosts")))
	must(t, os.Remove(filepath.Join(etc, "hostname")))
	must(t, os.Symlink("/dev/zero", filepath.Join(etc, "hostname")))
	writeFiles(t, root, "web", id)
	if got := content(t, etc, "hosts"); got != hosts("", "web") {
		t.Errorf("hosts holds %q", got)
	}
}

func writeFiles(t *testing.T, root, hostname, machineID string) {
	t.Helper()
	if misplaced, err := WriteFiles(root, hostname, machineID); err != nil || len(misplaced) > 0 {
		t.Fatalf("misplaced %v, %v", misplaced, err)
	}
}

// TestWhatIsRightStaysUntouched: not even its times change.
func TestWhatIsRightStaysUntouched(t *testing.T) {
	root, id := t.TempDir(), strings.Repeat("1", 32)
	writeFiles(t, root, "web", id)
	for _, name := range []string{"etc", "etc/hosts", "etc/hostname", "etc/machine-id"} {
		must(t, os.Chtimes(filepath.Join(root, name), epoch(), epoch()))
	}
	writeFiles(t, root, "web", id)
	for _, name := range []string{"etc", "etc/hosts", "etc/hostname", "etc/machine-id"} {
		if fi, err := os.Stat(filepath.Join(root, name)); err != nil || !fi.ModTime().Equal(epoch()) {
			t.Errorf("%s was written, %v", name, err)
		}
	}
}
