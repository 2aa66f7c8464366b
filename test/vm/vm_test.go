// Package vm_test runs sessions with the real binary and real guests on QEMU.
// It wants HOLDPOINT_TEST_BINARY, a holdpoint, and HOLDPOINT_TEST_IMAGE, the
// folder of an image built by it; `make test` prepares both.
package vm_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/test/session"
)

// The variables that say what to test.
const (
	binaryVariable = "HOLDPOINT_TEST_BINARY"
	imageVariable  = "HOLDPOINT_TEST_IMAGE"
)

// prepared skips a test for which nothing was prepared.
func prepared(t *testing.T) {
	t.Helper()
	for _, name := range []string{binaryVariable, imageVariable} {
		if os.Getenv(name) == "" {
			t.Skipf("%s is not set; run make test", name)
		}
		// Also tells the test cache what the result depends on.
		if _, err := os.Stat(os.Getenv(name)); err != nil {
			t.Fatal(err)
		}
	}
	if testing.Short() {
		t.Skip("real guests are slow")
	}
}

func TestScripts(t *testing.T) {
	prepared(t)
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			s, err := newSession()
			if err != nil {
				return err
			}
			s.Setup(env)
			return nil
		},
		Cmds:                commands(t),
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
	})
}

// newSession makes a session with the prepared holdpoint first in PATH and the
// prepared image under the name debian.
func newSession() (*session.Session, error) {
	s, err := session.New()
	if err != nil {
		return nil, err
	}
	if err := equip(s); err != nil {
		return nil, errors.Join(err, s.End())
	}
	return s, nil
}

func equip(s *session.Session) error {
	bin := filepath.Join(s.Dir, "bin")
	s.Binary = filepath.Join(bin, "holdpoint")
	binary, err := filepath.Abs(os.Getenv(binaryVariable))
	if err != nil {
		return err
	}
	if err := os.Mkdir(bin, 0o700); err != nil {
		return err
	}
	if err := os.Symlink(binary, s.Binary); err != nil {
		return err
	}
	s.Env = append(s.Env, "PATH="+bin+":"+os.Getenv("PATH"))
	return putImage(s, os.Getenv(imageVariable), "debian")
}

// putImage links the files of an image into the session's home, or copies them
// from another file system.
func putImage(s *session.Session, dir, name string) error {
	h, err := home.Open(s.Home)
	if err != nil {
		return err
	}
	if err := h.Create(); err != nil {
		return err
	}
	data, err := os.ReadFile(filepath.Join(dir, "manifest.json"))
	if err != nil {
		return err
	}
	var m image.Manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return err
	}
	to := filepath.Join(h.Images(), m.BuildID)
	if err := copyFolder(dir, to); err != nil {
		return err
	}
	return s.PutImage(catalog.Image{
		BuildID: m.BuildID, Name: name, Architecture: m.Architecture, KernelVersion: m.KernelVersion,
		DiskBytes: m.DiskBytes, StoredBytes: 1, Packages: m.Packages, CreatedAt: m.CreatedAt,
	})
}

func copyFolder(from, to string) error {
	if err := os.Mkdir(to, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		source, target := filepath.Join(from, e.Name()), filepath.Join(to, e.Name())
		err := os.Link(source, target)
		if errors.Is(err, syscall.EXDEV) || errors.Is(err, syscall.EPERM) {
			err = copyFile(source, target)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// copyFile keeps holes, mode and time.
func copyFile(from, to string) error {
	out, err := exec.Command("cp", "--sparse=always", "--reflink=auto", "--preserve=mode,timestamps", from, to).CombinedOutput()
	if err != nil {
		return fmt.Errorf("copy %s: %w: %s", from, err, out)
	}
	return nil
}
