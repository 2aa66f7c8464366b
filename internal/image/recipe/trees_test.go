package recipe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// fake makes a tree of one text.
type fake struct {
	key  string
	make func(ctx context.Context, tree io.Writer, work string) error
}

func (f fake) Key() string { return f.key }

func (f fake) Bootstrap(ctx context.Context, tree io.Writer, work string, _ *Log) error {
	return f.make(ctx, tree, work)
}

func says(text string) func(context.Context, io.Writer, string) error {
	return func(_ context.Context, tree io.Writer, _ string) error {
		_, err := io.WriteString(tree, text)
		return err
	}
}

func testStore(t *testing.T) Store {
	t.Helper()
	temp, err := os.MkdirTemp("", "hp") // t.TempDir is closed to others
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(temp) })
	if err := os.Chmod(temp, 0o755); err != nil {
		t.Fatal(err)
	}
	return Store{Dir: filepath.Join(t.TempDir(), "trees"), TempDir: temp, Now: time.Now}
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func TestStore(t *testing.T) {
	s := testStore(t)
	if s.Has("a") {
		t.Error("an empty store has a tree")
	}
	if err := s.Make(t.Context(), fake{"a", says("hello")}, nil); err != nil {
		t.Fatal(err)
	}
	tree, err := s.Open("a")
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(tree)
	if err != nil || string(text) != "hello" || tree.Done() != tree.Bytes {
		t.Errorf("%q, %d of %d, %v", text, tree.Done(), tree.Bytes, err)
	}
	if err := tree.Close(); err != nil {
		t.Error(err)
	}
	later := s
	later.Now = func() time.Time { return time.Now().Add(treeAge + time.Hour) }
	if later.Has("a") {
		t.Error("an old tree is used")
	}
	earlier := s
	earlier.Now = func() time.Time { return time.Now().Add(-time.Hour) }
	if earlier.Has("a") {
		t.Error("a tree from the future is used")
	}
	if err := s.Drop("a"); err != nil || s.Has("a") {
		t.Errorf("drop: %v", err)
	}
}

func TestStoreIsBounded(t *testing.T) {
	s := testStore(t)
	for i := range keptTrees + 2 {
		key := fmt.Sprint("k", i)
		if err := s.Make(t.Context(), fake{key, says(key)}, nil); err != nil {
			t.Fatal(err)
		}
		old := time.Now().Add(time.Duration(i-100) * time.Minute)
		if err := os.Chtimes(filepath.Join(s.Dir, key+treeSuffix), old, old); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"k2" + treeSuffix, "k3" + treeSuffix, "k4" + treeSuffix}
	if got := names(t, s.Dir); !slices.Equal(got, want) {
		t.Errorf("kept %v, want %v", got, want)
	}
}

func TestMakeFailsWithoutTrace(t *testing.T) {
	s := testStore(t)
	boom := errors.New("boom")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for name, f := range map[string]func(context.Context, io.Writer, string) error{
		"error": func(_ context.Context, tree io.Writer, work string) error {
			_, _ = io.WriteString(tree, strings.Repeat("x", 1<<20))
			return errors.Join(boom, os.WriteFile(filepath.Join(work, "leftover"), nil, 0o600))
		},
		"cancel": func(_ context.Context, tree io.Writer, work string) error {
			cancel()
			return os.Mkdir(filepath.Join(work, "folder"), 0o700)
		},
	} {
		if err := s.Make(ctx, fake{"a", f}, nil); !errors.Is(err, boom) && !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
		if left := append(names(t, s.Dir), names(t, s.TempDir)...); len(left) > 0 {
			t.Errorf("%s: left behind %v", name, left)
		}
	}
}

func TestSweep(t *testing.T) {
	s := testStore(t)
	if err := s.Make(t.Context(), fake{"a", says("x")}, nil); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(s.TempDir, "holdpoint-build-00000000-1")
	for _, path := range []string{filepath.Join(s.TempDir, s.workPrefix()+"1", "deep"), foreign} {
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(s.Dir, "b"+treeSuffix+".1"+partialSuffix), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := names(t, s.TempDir); !slices.Equal(got, []string{filepath.Base(foreign)}) {
		t.Errorf("temporary folder has %v", got)
	}
	if got := names(t, s.Dir); !slices.Equal(got, []string{"a" + treeSuffix}) {
		t.Errorf("store has %v", got)
	}
}

func TestWorkFolderMustBePassable(t *testing.T) {
	s := testStore(t)
	closed := filepath.Join(s.TempDir, "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	s.TempDir = filepath.Join(closed, "tmp")
	if err := os.Mkdir(s.TempDir, 0o755); err != nil {
		t.Fatal(err)
	}
	err := s.Make(t.Context(), fake{"a", says("x")}, nil)
	if !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), "chmod o+x "+closed) {
		t.Errorf("%v; want INVALID naming %s", err, closed)
	}
}

func TestPackageList(t *testing.T) {
	all, err := packageList([]string{"nginx", "vim=2:9.0.1378-2+deb12u2", "g++"})
	if err != nil || !slices.IsSorted(all) || !slices.Contains(all, "g++") || len(all) != len(recipePackages())+2 {
		t.Errorf("%v, %v", all, err)
	}
	for _, bad := range []string{"", "-o", "a b", "a,b", "./x.deb", "A", "?narrow(x)", "a=", "a\nb"} {
		if _, err := packageList([]string{bad}); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("package %q: %v, want INVALID", bad, err)
		}
	}
}

// TestKeyCoversInputs: whatever changes the tree changes the key.
func TestKeyCoversInputs(t *testing.T) {
	base := inputs{Steps: "s", Suite: "bookworm", Packages: []string{"a", "b"}, Sources: []string{"deb x"}}
	seen := map[string]string{base.key(): "base"}
	for name, change := range map[string]func(*inputs){
		"steps":    func(in *inputs) { in.Steps = "t" },
		"suite":    func(in *inputs) { in.Suite = "trixie" },
		"packages": func(in *inputs) { in.Packages = []string{"a,b"} },
		"script":   func(in *inputs) { in.Script = "x" },
		"user":     func(in *inputs) { in.User = "x" },
		"files":    func(in *inputs) { in.Files = "x" },
		"sources":  func(in *inputs) { in.Sources = nil },
		"base":     func(in *inputs) { in.Base = "x" },
	} {
		in := base
		change(&in)
		if other, ok := seen[in.key()]; ok {
			t.Errorf("%s has the key of %s", name, other)
		}
		seen[in.key()] = name
	}
}

func TestArguments(t *testing.T) {
	d := &Debian{
		inputs:  inputs{Suite: "bookworm", Packages: []string{"a", "b"}, Sources: []string{"deb http://m/ bookworm main"}},
		options: []string{`Acquire::Retries "3";`},
	}
	args := d.arguments("/it's/script", "", "")
	for _, want := range []string{
		"--mode=unshare", "--include=a,b", `--aptopt=Acquire::Retries "3";`,
		`--customize-hook=upload '/it'\''s/script' /tmp/holdpoint-script`, "--customize-hook=" + scriptStep,
	} {
		if !slices.Contains(args, want) {
			t.Errorf("no %q in %q", want, args)
		}
	}
	if tail := args[len(args)-3:]; !slices.Equal(tail, []string{"bookworm", "-", "deb http://m/ bookworm main"}) {
		t.Errorf("the end is %q", tail)
	}
	if slices.Contains(d.arguments("", "", ""), "--customize-hook="+scriptStep) {
		t.Error("a build without a script runs one")
	}
	d.base = &Debian{inputs: inputs{Packages: []string{"a"}}}
	args = d.arguments("", "", "/base")
	for _, want := range []string{"--variant=custom", "--include=b", "--setup-hook=base='/base'\n" + baseStep} {
		if !slices.Contains(args, want) {
			t.Errorf("no %q in %q", want, args)
		}
	}
	if slices.Contains(args, "--customize-hook="+kernelStep) {
		t.Error("a tree with a kernel gets another one")
	}
}

// TestAdditions: the user is there before files, which may be that one's, and
// both before the script.
func TestAdditions(t *testing.T) {
	d := &Debian{more: Additions{User: "app"}}
	args := d.arguments("/script", "/work/the files", "")
	at := func(hook string) int { return slices.Index(args, "--customize-hook="+hook) }
	user, files, script := at("user='app'\n"+userStep), at("tar-in '/work/the files' /"), at(scriptStep)
	if kernel := at(kernelStep); kernel < 0 || user < kernel || files < user || script < files || at(finishStep) < script {
		t.Errorf("the steps are %q", args)
	}
}

// tarOf is a Files that changes when it is written again, if it is to.
type tarOf struct {
	content []string
	written int
}

func (f *tarOf) WriteTar(_ context.Context, w io.Writer) error {
	_, err := io.WriteString(w, f.content[min(f.written, len(f.content)-1)])
	f.written++
	return err
}

func TestKeepFiles(t *testing.T) {
	for _, files := range []*tarOf{{content: []string{"a"}}, {content: []string{"a", "b"}}} {
		sum, err := writeFiles(t.Context(), files, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		d := &Debian{more: Additions{Files: files}, inputs: inputs{Files: sum}}
		path := filepath.Join(t.TempDir(), "files")
		err = d.keepFiles(t.Context(), path)
		if data, _ := os.ReadFile(path); len(files.content) == 1 && (err != nil || string(data) != "a") {
			t.Errorf("%q, %v", data, err)
		}
		if len(files.content) == 2 && !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("changed files: %v", err)
		}
	}
}
