package launch_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/cli/launch"
)

// Two programs of one version have different builds if they differ at all,
// and the same program has the same, wherever it lies; also when the linker
// was told to leave its build id out, and on other systems' formats.
func TestBuild(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("go.mod", "module x\n")
	build := func(name, word, ldflags, goos string) string {
		t.Helper()
		write("main.go", "package main\n\nfunc main() { println(\""+word+"\") }\n")
		path := filepath.Join(dir, name)
		cmd := exec.Command("go", "build", "-ldflags="+ldflags, "-o", path, ".")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH=amd64", "GOFLAGS=", "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		digest, err := launch.DigestOf(f)
		if err != nil {
			t.Fatal(err)
		}
		return digest
	}
	for _, goos := range []string{"linux", "darwin"} {
		one, same, two := build("one", "a", "", goos), build("same", "a", "", goos), build("two", "b", "", goos)
		if one != same || one == two {
			t.Errorf("%s: %s, %s, %s", goos, one, same, two)
		}
	}
	if build("three", "a", "-s -w -buildid=", "linux") == build("four", "b", "-s -w -buildid=", "linux") {
		t.Error("programs without a build id are not told apart")
	}
	if got := launch.Build("1.2"); !strings.HasPrefix(got, "1.2+") || len(got) != len("1.2+")+12 || got != launch.Build("1.2") {
		t.Errorf("Build = %q", got)
	}
}
