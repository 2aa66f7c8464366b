package vm_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// ordinary is the user and group that a root test becomes: Debian's nobody and
// nogroup (base-passwd).
const ordinary = 65534

// TestOrdinaryUser runs the whole story again without any privilege.
func TestOrdinaryUser(t *testing.T) {
	prepared(t)
	if os.Geteuid() != 0 {
		t.Skip("all tests run as an ordinary user already")
	}
	dir, err := os.MkdirTemp("/tmp", "hpu")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// None of the prepared files is readable to others, so it gets its own.
	program, binary, image := filepath.Join(dir, "vm.test"), filepath.Join(dir, "holdpoint"), filepath.Join(dir, "image")
	if err := os.Mkdir(image, 0o700); err != nil {
		t.Fatal(err)
	}
	files := map[string]string{self: program, os.Getenv(binaryVariable): binary}
	for _, name := range []string{"manifest.json", "kernel", "initramfs", "root.img"} {
		files[filepath.Join(os.Getenv(imageVariable), name)] = filepath.Join(image, name)
	}
	for from, to := range files {
		if err := copyFile(from, to); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.Command("cp", "-r", "testdata", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	err = filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, ordinary, ordinary)
	})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, "-test.run=^TestScripts$/^story$", "-test.v", "-test.timeout=5m")
	cmd.Dir = dir
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "TMPDIR=" + dir,
		binaryVariable + "=" + binary, imageVariable + "=" + image,
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: ordinary, Gid: ordinary}, Setsid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	text, err := cmd.CombinedOutput()
	t.Logf("%s", text)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), "--- PASS: TestScripts/story") {
		t.Error("the story did not run")
	}
}
