package memory

import (
	"bytes"
	"os"
	"testing"

	"github.com/holdpoint/holdpoint/internal/store"
)

func TestCheckRemovesWhatDiffers(t *testing.T) {
	const pages = 600
	damage := map[string]func(path string) error{
		"nothing": func(string) error { return nil },
		"a byte": func(path string) error {
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteAt([]byte{0xff}, 500*store.PageSize+7)
			return err
		},
		"too short": func(path string) error { return os.Truncate(path, 10) },
		"too long":  func(path string) error { return os.Truncate(path, (pages+1)*store.PageSize) },
	}
	for name, spoil := range damage {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			memory := make([]byte, pages*store.PageSize)
			copy(memory, noise(1, pages/2))
			w.layer(1, 0, memory, 0, pages)
			f, release := w.open(full(1))
			release()
			must(t, os.Chmod(f.Path, 0o600))
			must(t, spoil(f.Path))
			removed, err := w.Check(t.Context(), full(1))
			must(t, err)
			_, err = os.Stat(f.Path)
			if kept := err == nil; kept != (name == "nothing") || removed == kept {
				t.Errorf("kept: %v, removed: %v", kept, removed)
			}
			again, release := w.open(full(1))
			defer release()
			got, err := os.ReadFile(again.Path)
			must(t, err)
			if !bytes.Equal(got, memory) {
				t.Error("the file that is opened next differs")
			}
		})
	}
	w := newWorld(t)
	w.layer(1, 0, make([]byte, pages*store.PageSize), 0, pages)
	if removed, err := w.Check(t.Context(), full(1)); err != nil || removed { // there is none
		t.Errorf("removed: %v, %v", removed, err)
	}
}

func TestOpenMakesAShortFileAnew(t *testing.T) {
	const pages = 600
	w := newWorld(t)
	memory := noise(2, pages)
	w.layer(1, 0, memory, 0, pages)
	f, release := w.open(full(1))
	release()
	must(t, os.Chmod(f.Path, 0o600))
	must(t, os.Truncate(f.Path, 10))
	again, release := w.open(full(1))
	defer release()
	got, err := os.ReadFile(again.Path)
	must(t, err)
	if !again.Made || !bytes.Equal(got, memory) {
		t.Errorf("made anew: %v", again.Made)
	}
}
