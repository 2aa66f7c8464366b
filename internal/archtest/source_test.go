package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/holdpoint/holdpoint"

// file is one parsed Go file of this module.
type file struct {
	// path is relative to the module's root, dir is its folder ("." for the root).
	path, dir string
	test      bool
	generated bool
	fset      *token.FileSet
	ast       *ast.File
	lines     int
}

// root is the module's root folder.
func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// source parses each Go file of the module once per test binary.
func source(t *testing.T) []file {
	t.Helper()
	files, err := parseOnce()
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 10 {
		t.Fatalf("found %d Go files: the walk is wrong", len(files))
	}
	return files
}

var parseOnce = sync.OnceValues(func() ([]file, error) {
	var files []file
	top := filepath.Join("..", "..")
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path != top && (name == "testdata" || name == "tools" || name == "bin" || strings.HasPrefix(name, ".")) {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		f, err := parse(top, path)
		if err == nil {
			files = append(files, f)
		}
		return err
	})
	return files, err
})

func parse(top, path string) (file, error) {
	rel, err := filepath.Rel(top, path)
	if err != nil {
		return file{}, err
	}
	f := file{path: filepath.ToSlash(rel), fset: token.NewFileSet()}
	f.dir = filepath.ToSlash(filepath.Dir(rel))
	f.test = strings.HasSuffix(rel, "_test.go")
	f.ast, err = parser.ParseFile(f.fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return file{}, err
	}
	f.generated = ast.IsGenerated(f.ast)
	f.lines = f.fset.File(f.ast.Pos()).LineCount()
	return f, nil
}

// code is source without tests and generated files.
func code(t *testing.T) []file {
	var out []file
	for _, f := range source(t) {
		if !f.test && !f.generated {
			out = append(out, f)
		}
	}
	return out
}
