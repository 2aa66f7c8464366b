package archtest

import (
	"go/ast"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	markdownLink = regexp.MustCompile(`\[([^\]]*)\]\(([^)\s]+)\)`)
	codeFence    = regexp.MustCompile("(?ms)^```.*?^```")
)

// documents are all Markdown files, by their path from the module's root.
func documents(t *testing.T) map[string]string {
	t.Helper()
	docs := make(map[string]string)
	top := root(t)
	err := filepath.WalkDir(top, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && name != top && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || d.Name() == "bin") {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(name, ".md") {
			return nil
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(top, name)
		docs[filepath.ToSlash(rel)] = codeFence.ReplaceAllString(string(text), "")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return docs
}

// functions gives the names of the functions, methods and types in each file.
func functions(t *testing.T) map[string]map[string]bool {
	byFile := make(map[string]map[string]bool)
	for _, f := range source(t) {
		names := make(map[string]bool)
		for _, decl := range f.ast.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				names[functionName(d)] = true
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					if s, ok := spec.(*ast.TypeSpec); ok {
						names[s.Name.Name] = true
					}
				}
			}
		}
		byFile[f.path] = names
	}
	return byFile
}

// TestLinksInDocuments: a relative link leads to a file that exists, and one
// to a Go file is called by what it points to there: `Function`, `Type` or
// `Type.Method`.
func TestLinksInDocuments(t *testing.T) {
	byFile := functions(t)
	docs := documents(t)
	if docs["README.md"] == "" || docs["docs/story.md"] == "" {
		t.Fatal("README.md or docs/story.md is missing")
	}
	linked := 0
	for doc, text := range docs {
		for _, m := range markdownLink.FindAllStringSubmatch(text, -1) {
			u, err := url.Parse(m[2])
			if err != nil || u.Scheme != "" || u.Path == "" {
				continue
			}
			target := path.Join(path.Dir(doc), u.Path)
			if _, err := os.Stat(filepath.Join(root(t), filepath.FromSlash(target))); err != nil {
				t.Errorf("%s: link to %s: no such file", doc, target)
				continue
			}
			if !strings.HasSuffix(target, ".go") {
				continue
			}
			linked++
			if name := strings.Trim(m[1], "`"); !byFile[target][name] {
				t.Errorf("%s: %s has no %q", doc, target, name)
			}
		}
	}
	if linked < 10 {
		t.Errorf("only %d links lead to code: docs/story.md has lost its links", linked)
	}
}
