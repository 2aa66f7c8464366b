package store

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// spare makes a spare file with this content.
func (cfg *MaterializeConfig) spare(t *testing.T, content []byte) {
	t.Helper()
	cfg.Spare = filepath.Join(filepath.Dir(cfg.Path), "spare")
	must(t, os.WriteFile(cfg.Spare, content, 0o600))
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	st, err := os.Stat(path)
	must(t, err)
	return st.Sys().(*syscall.Stat_t).Ino
}

func alone(t *testing.T, cfg MaterializeConfig, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(cfg.Path))
	must(t, err)
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if len(got) != len(names) || len(got) == 1 && got[0] != names[0] {
		t.Errorf("there are %v, want %v", got, names)
	}
}

// TestSpareIsRewritten: it becomes the memory file, with what it had in common
// left alone and its other data gone.
func TestSpareIsRewritten(t *testing.T) {
	cfg, memory := baseWorld(t)
	whole := noise(7, len(memory)/PageSize) // nowhere zero
	some := bytes.Clone(memory)
	copy(some[5*PageSize:], noise(8, 40))
	for name, content := range map[string][]byte{"another": whole, "like": some, "the same": memory} {
		cfg.spare(t, content)
		was := inode(t, cfg.Spare)
		cfg.gives(t, memory)
		if inode(t, cfg.Path) != was {
			t.Errorf("%s: it is another file", name)
		}
		alone(t, cfg, "memory")
		f, err := os.Open(cfg.Path)
		must(t, err)
		for _, page := range []int64{10, 39} {
			if data, err := f.Seek(page*PageSize, unix.SEEK_DATA); err != nil || data == page*PageSize {
				t.Errorf("%s: page %d is no hole: %v", name, page, err)
			}
		}
		must(t, f.Close())
	}
	damage(t, cfg.Layers[0])
	damage(t, cfg.Layers[1])
	cfg.spare(t, memory)
	cfg.gives(t, memory)
}

// TestSpareInUseIsNotWritten: whoever has it open or mapped keeps what it has.
func TestSpareInUseIsNotWritten(t *testing.T) {
	content := noise(7, 4*batchPages)
	for _, mode := range []int{os.O_RDONLY, os.O_RDWR} {
		for _, mapped := range []bool{false, true} {
			cfg, memory := baseWorld(t)
			cfg.spare(t, content)
			was := inode(t, cfg.Spare)
			f, err := os.OpenFile(cfg.Spare, mode, 0)
			must(t, err)
			var seen []byte
			if mapped {
				seen, err = unix.Mmap(int(f.Fd()), 0, len(content), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
				must(t, err)
				must(t, f.Close())
			}
			cfg.gives(t, memory)
			if inode(t, cfg.Path) == was {
				t.Errorf("mode %d, mapped %v: it was rewritten", mode, mapped)
			}
			alone(t, cfg, "memory")
			if mapped {
				if !bytes.Equal(seen, content) {
					t.Error("the mapping changed")
				}
				must(t, unix.Munmap(seen))
			} else {
				must(t, f.Close())
			}
		}
	}
}

func TestSpareThatIsNone(t *testing.T) {
	cfg, memory := baseWorld(t)
	cfg.Base = bytes.NewReader(memory)
	damage(t, cfg.Layers[0]) // so that the base is needed
	cfg.spare(t, memory[PageSize:])
	cfg.gives(t, memory)
	alone(t, cfg, "memory")
	other := filepath.Join(t.TempDir(), "other")
	content := noise(7, 4*batchPages)
	must(t, os.WriteFile(other, content, 0o600))
	must(t, os.Symlink(other, cfg.Spare))
	cfg.gives(t, memory)
	alone(t, cfg, "memory")
	if got, err := os.ReadFile(other); err != nil || !bytes.Equal(got, content) {
		t.Errorf("what a link leads to was written: %v", err)
	}
	cfg.gives(t, memory) // it is not there
}

// TestSpareIsGoneAfterFailures: half rewritten it is of no use to anybody.
func TestSpareIsGoneAfterFailures(t *testing.T) {
	crash := errors.New("crash")
	for name, c := range map[string]struct {
		change func(*MaterializeConfig) context.Context
		want   func(error) bool
	}{
		"damaged layer": {func(cfg *MaterializeConfig) context.Context {
			damage(t, cfg.Layers[0])
			return t.Context()
		}, func(err error) bool { return errdefs.Is(err, errdefs.Storage) }},
		"no lowest layer": {func(cfg *MaterializeConfig) context.Context {
			cfg.Layers = cfg.Layers[1:]
			return t.Context()
		}, func(err error) bool { return errdefs.Is(err, errdefs.Invalid) }},
		"canceled": {func(*MaterializeConfig) context.Context {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			return ctx
		}, func(err error) bool { return errors.Is(err, context.Canceled) }},
		"no rename": {func(cfg *MaterializeConfig) context.Context {
			cfg.FS = &durable.FS{Before: func(s durable.Step) error {
				if s.Op == durable.OpRename {
					return crash
				}
				return nil
			}}
			return t.Context()
		}, func(err error) bool { return errors.Is(err, crash) }},
	} {
		cfg, memory := baseWorld(t)
		cfg.spare(t, noise(7, len(memory)/PageSize))
		ctx := c.change(&cfg)
		if err := Materialize(ctx, cfg); !c.want(err) {
			t.Errorf("%s: %v", name, err)
		}
		alone(t, cfg)
	}
}
