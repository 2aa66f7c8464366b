package durable_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/durable/durabletest"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestWriteFileTranscript(t *testing.T) {
	dir := t.TempDir()
	var fs durable.FS
	rec := durabletest.Record(&fs, dir)
	path := filepath.Join(dir, "run", "record.json")
	must(t, fs.MkdirAll(filepath.Dir(path)))
	must(t, fs.WriteFile(path, []byte("one"), 0o600))
	must(t, fs.Chmod(path, 0o400))
	must(t, fs.Commit("publish-checkpoint", func() error { return nil }))
	must(t, fs.Remove(path))
	must(t, fs.RemoveAll(filepath.Dir(path)))
	want := `mkdir run
syncdir .
create run/record.json.tmp
write 3 run/record.json.tmp
sync run/record.json.tmp
rename run/record.json.tmp -> run/record.json
syncdir run
chmod 0400 run/record.json
commit publish-checkpoint
remove run/record.json
syncdir run
removeall run
syncdir .
`
	if diff := cmp.Diff(want, rec.String()); diff != "" {
		t.Error(diff)
	}
}

func TestWriteFileIsOldOrNewAfterAnyCrash(t *testing.T) {
	for k := 0; ; k++ {
		dir := t.TempDir()
		path := filepath.Join(dir, "f")
		var fs durable.FS
		must(t, fs.WriteFile(path, []byte("old"), 0o600))
		crashed := durabletest.CrashAfter(&fs, k)
		err := fs.WriteFile(path, []byte("newer"), 0o600)
		got, readErr := os.ReadFile(path)
		must(t, readErr)
		if s := string(got); s != "old" && s != "newer" {
			t.Fatalf("after %d steps: content %q", k, s)
		}
		if !crashed() {
			must(t, err)
			if string(got) != "newer" || k != 5 {
				t.Fatalf("after all of %d steps: content %q", k, got)
			}
			return
		}
		if !errors.Is(err, durabletest.ErrCrashed) {
			t.Fatalf("after %d steps: error %v", k, err)
		}
		fs.Before = nil
		must(t, fs.RemoveTemps(dir))
		if names := list(t, dir); names != "f" {
			t.Fatalf("after %d steps and a sweep: files %s", k, names)
		}
	}
}

func TestWriteFileRemovesItsTempOnError(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "f"), 0o700)) // a folder cannot be replaced by a file
	var fs durable.FS
	if err := fs.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o600); !errdefs.Is(err, errdefs.Storage) && !errdefs.Is(err, errdefs.AlreadyExists) {
		t.Fatalf("error %v", err)
	}
	if names := list(t, dir); names != "f" {
		t.Fatalf("files %s", names)
	}
}

func TestRemoveTempsKeepsTheRest(t *testing.T) {
	dir := t.TempDir()
	for _, n := range []string{"a.0123456789abcdef.tmp", "a.tmp", "0123456789abcdef.tmp", "a.0123.tmp", "b"} {
		must(t, os.WriteFile(filepath.Join(dir, n), nil, 0o600))
	}
	var fs durable.FS
	must(t, fs.RemoveTemps(dir))
	if got, want := list(t, dir), "0123456789abcdef.tmp a.0123.tmp a.tmp b"; got != want {
		t.Fatalf("files %s, want %s", got, want)
	}
}

func TestCreateExclusive(t *testing.T) {
	dir := t.TempDir()
	var fs durable.FS
	must(t, os.Symlink(filepath.Join(dir, "elsewhere"), filepath.Join(dir, "link")))
	f, err := fs.CreateExclusive(filepath.Join(dir, "new"), 0o600)
	must(t, err)
	must(t, f.Close())
	must(t, f.Close())
	for _, name := range []string{"new", "link"} {
		if _, err := fs.CreateExclusive(filepath.Join(dir, name), 0o600); !errdefs.Is(err, errdefs.AlreadyExists) {
			t.Errorf("create %s: error %v", name, err)
		}
	}
}

func TestRemoveAllFollowsNoSymlink(t *testing.T) {
	dir := t.TempDir()
	keep := filepath.Join(dir, "keep")
	must(t, os.Mkdir(keep, 0o700))
	must(t, os.WriteFile(filepath.Join(keep, "f"), nil, 0o600))
	must(t, os.MkdirAll(filepath.Join(dir, "gone", "deep"), 0o700))
	must(t, os.Symlink(keep, filepath.Join(dir, "gone", "deep", "link")))
	must(t, os.Symlink(keep, filepath.Join(dir, "link")))
	var fs durable.FS
	for _, name := range []string{"gone", "link", "never-was", "no/such/parent"} {
		must(t, fs.RemoveAll(filepath.Join(dir, name)))
	}
	if got := list(t, dir); got != "keep" {
		t.Errorf("files %s", got)
	}
	if got := list(t, keep); got != "f" {
		t.Errorf("files behind the symlink: %s", got)
	}
}

func TestMkdirRefusesWhatIsNotPrivate(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "open"), 0o700))
	must(t, os.Chmod(filepath.Join(dir, "open"), 0o750))
	must(t, os.Mkdir(filepath.Join(dir, "real"), 0o700))
	must(t, os.Symlink("real", filepath.Join(dir, "link")))
	must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	refused := []string{"open", "link", "file"}
	if os.Geteuid() == 0 {
		must(t, os.Mkdir(filepath.Join(dir, "foreign"), 0o700))
		must(t, os.Chown(filepath.Join(dir, "foreign"), 12345, -1))
		must(t, os.Lchown(filepath.Join(dir, "link"), 12345, -1))
		refused = append(refused, "foreign", "link/below", "link/real/below")
	} else {
		refused = append(refused, "link/below")
	}
	var fs durable.FS
	for _, name := range refused {
		if err := fs.MkdirAll(filepath.Join(dir, name)); !errdefs.Is(err, errdefs.Denied) {
			t.Errorf("make %s: error %v", name, err)
		}
	}
	must(t, fs.MkdirAll(filepath.Join(dir, "real", "a", "b")))
	must(t, fs.MkdirAll(filepath.Join(dir, "real", "a", "b")))
	must(t, fs.Mkdir(filepath.Join(dir, "real", "a")))
}

// TestMain is also the other process of TestLock.
func TestMain(m *testing.M) {
	if path := os.Getenv("DURABLE_TEST_LOCK"); path != "" {
		var fs durable.FS
		_, err := fs.Lock(path)
		fmt.Println(errdefs.KindOf(err), err)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	var fs durable.FS
	lock, err := fs.Lock(path)
	must(t, err)
	other := func() string {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "DURABLE_TEST_LOCK="+path)
		out, err := cmd.CombinedOutput()
		must(t, err)
		return string(out)
	}
	want := fmt.Sprintf("CONFLICT lock %q: held by process %d; stop it first\n", path, os.Getpid())
	if got := other(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if _, err := fs.Lock(path); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("second lock of one process: error %v", err)
	}
	must(t, lock.Unlock())
	must(t, lock.Unlock())
	if got, want := other(), " <nil>\n"; got != want {
		t.Errorf("after unlock: got %q, want %q", got, want)
	}
}

func TestErrorsKeepTheirCause(t *testing.T) {
	var fs durable.FS
	path := filepath.Join(t.TempDir(), "none")
	err := fs.Sync(path)
	if !errdefs.Is(err, errdefs.Storage) || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
	if _, err := os.Stat("/dev/full"); err == nil {
		f, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		must(t, err)
		defer f.Close()
		if _, err := f.Write([]byte("x")); err == nil {
			t.Error("/dev/full took a byte")
		} else if got := durable.Classify("/dev/full", err); !errdefs.Is(got, errdefs.NoSpace) {
			t.Errorf("full disk: %v", got)
		}
	}
	free, err := durable.FreeBytes(t.TempDir())
	if err != nil || free <= 0 {
		t.Errorf("free bytes %d, error %v", free, err)
	}
}

func TestNewID(t *testing.T) {
	a, b := durable.NewID(), durable.NewID()
	if len(a) != 16 || a == b || strings.Trim(a, "0123456789abcdef") != "" {
		t.Errorf("ids %q, %q", a, b)
	}
}

func list(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, " ")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
