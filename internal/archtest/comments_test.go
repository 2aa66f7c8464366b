package archtest

import (
	"go/ast"
	"go/token"
	"path"
	"strings"
	"testing"
)

func TestPackageComments(t *testing.T) {
	comments := make(map[string]string)
	names := make(map[string]string)
	for _, f := range code(t) {
		names[f.dir] = f.ast.Name.Name
		if f.ast.Doc == nil {
			continue
		}
		if comments[f.dir] != "" {
			t.Errorf("%s: a second package comment of %s", f.path, f.dir)
		}
		comments[f.dir] = f.ast.Doc.Text()
	}
	for dir, name := range names {
		text, want := comments[dir], "Package "+name+" "
		begins := strings.HasPrefix(text, want)
		if name == "main" {
			want = "Command " + path.Base(dir)
			begins = strings.HasPrefix(text, want) || strings.HasPrefix(text, "The "+path.Base(dir)+" command")
		}
		if !begins || len(strings.Fields(text)) < 8 {
			t.Errorf("package %s: its comment must begin with %q and say what it is and what it is not; got %q", dir, want, text)
		}
	}
}

// TestExportedNamesAreDocumented takes a comment over a group of constants or
// variables for all of them. Fields and methods of unexported types are free.
func TestExportedNamesAreDocumented(t *testing.T) {
	for _, f := range code(t) {
		if f.ast.Name.Name == "main" {
			continue
		}
		for _, decl := range f.ast.Decls {
			for _, name := range undocumented(decl) {
				t.Errorf("%s: %s has no comment", f.path, name)
			}
		}
	}
}

func undocumented(decl ast.Decl) []string {
	var names []string
	switch d := decl.(type) {
	case *ast.FuncDecl:
		exported := ast.IsExported(d.Name.Name)
		if d.Recv != nil && len(d.Recv.List) > 0 {
			exported = exported && ast.IsExported(receiver(d.Recv.List[0].Type))
		}
		if exported && d.Doc == nil {
			names = append(names, functionName(d))
		}
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			switch s := spec.(type) {
			case *ast.TypeSpec:
				if ast.IsExported(s.Name.Name) && d.Doc == nil && s.Doc == nil {
					names = append(names, s.Name.Name)
				}
			case *ast.ValueSpec:
				group := d.Doc != nil && (d.Lparen != token.NoPos || len(d.Specs) == 1)
				for _, name := range s.Names {
					if ast.IsExported(name.Name) && !group && s.Doc == nil && s.Comment == nil {
						names = append(names, name.Name)
					}
				}
			}
		}
	}
	return names
}
