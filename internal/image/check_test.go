package image

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// age waits until files changed just now count as settled. Change times cannot
// be set, so the test waits them out.
func age() { <-time.After(settled + 10*time.Millisecond) }

// changes are what can befall a file.
func changes() map[string]func(path string) error {
	return map[string]func(path string) error{
		"a changed byte under old times": func(path string) error {
			info, err := os.Stat(path)
			if err != nil {
				return err
			}
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			if _, err := f.WriteAt([]byte{'!'}, 3); err != nil {
				return err
			}
			return os.Chtimes(path, info.ModTime(), info.ModTime())
		},
		"cut short": func(path string) error { return os.Truncate(path, 5) },
		"missing":   os.Remove,
		"a symlink": func(path string) error {
			if err := os.Rename(path, path+".moved"); err != nil {
				return err
			}
			return os.Symlink(path+".moved", path)
		},
	}
}

func TestCheckFindsEveryChange(t *testing.T) {
	type trial struct {
		img          Image
		file, change string
	}
	var trials []trial
	for _, file := range []string{kernelFile, initramfsFile, rootFile} {
		for change := range changes() {
			trials = append(trials, trial{testImage(t), file, change})
		}
	}
	age()
	for _, c := range trials {
		t.Run(c.file+"/"+c.change, func(t *testing.T) {
			for range 2 { // the second one rests on the first one's record
				if err := c.img.Check(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if n := len(c.img.readVerified().Files); n != 3 {
				t.Fatalf("%d files are recorded, want 3", n)
			}
			path := filepath.Join(c.img.Dir, c.file)
			if err := changes()[c.change](path); err != nil {
				t.Fatal(err)
			}
			err := c.img.Check(t.Context())
			if !errdefs.Is(err, errdefs.Storage) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "build it again") {
				t.Errorf("Check: %v; want STORAGE with the path and what to do", err)
			}
		})
	}
}

// TestCheckTrustsItsRecord shows that what was found right is not read again,
// by a record that was made to fit a changed file.
func TestCheckTrustsItsRecord(t *testing.T) {
	img := testImage(t)
	record := filepath.Join(img.Dir, verifiedFile)
	age()
	if err := img.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(img.Kernel(), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(img.Kernel(), []byte("KERNEL"), 0o600); err != nil {
		t.Fatal(err)
	}
	v := img.readVerified()
	if len(v.Files) != 3 {
		t.Fatalf("recorded %d files, want 3", len(v.Files))
	}
	f, err := os.Open(img.Kernel())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if v.Files[kernelFile], err = lookAt(f); err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(record, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := img.Check(t.Context()); err != nil {
		t.Errorf("Check read a file that its record describes: %v", err)
	}
	for _, damage := range []string{"", "{", `{"version":2}`, `{"version":1,"build_id":"x"}`, strings.Repeat(" ", maxVerified+1)} {
		if err := os.WriteFile(record, []byte(damage), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := img.Check(t.Context()); !errdefs.Is(err, errdefs.Storage) {
			t.Errorf("Check with the record %.20q: %v; want it to read the files", damage, err)
		}
	}
}

// TestSettled: a file that was just changed is not recorded, for another change
// in the same tick of the clock would not show.
func TestSettled(t *testing.T) {
	now := time.Now()
	l := looks{Modified: now.Add(-time.Hour).UnixNano(), Changed: now.UnixNano()}
	if l.settled(now.Add(settled / 2)) {
		t.Error("a change half a moment ago counts as settled")
	}
	if !l.settled(now.Add(2 * settled)) {
		t.Error("an old change does not count as settled")
	}
	if l.settled(now.Add(-time.Hour)) {
		t.Error("a change from the future counts as settled")
	}
}
