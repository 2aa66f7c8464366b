package archtest

import (
	"go/ast"
	"slices"
	"strings"
	"testing"
)

// The size budgets, in lines. Tests and generated code do not count.
const (
	maxFunction = 60
	maxFile     = 400
	maxPackage  = 1500
)

// largeFunctions, largeFiles and largePackages are the exceptions from the
// budget, with the reason of each. A function is called "folder.Name" or
// "folder.Type.Name".
var (
	largeFunctions = map[string]string{}
	largeFiles     = map[string]string{}
	largePackages  = map[string]string{}
)

// packageVariables are the variables at package level that are neither errors
// nor compiled constants, as "folder.name" with the reason of each.
var packageVariables = map[string]string{
	"cmd/holdpoint.version": "the linker sets it (-X)",
}

// initFunctions are the packages that may have an init function.
var initFunctions = map[string]string{}

func TestSizeBudget(t *testing.T) {
	packages := make(map[string]int)
	used := make(map[string]bool)
	for _, f := range code(t) {
		packages[f.dir] += f.lines
		if f.lines > maxFile && largeFiles[f.path] == "" {
			t.Errorf("%s has %d lines, at most %d are allowed", f.path, f.lines, maxFile)
		}
		used[f.path] = f.lines > maxFile
		for _, decl := range f.ast.Decls {
			fn, ok := decl.(*ast.FuncDecl)
			if !ok {
				continue
			}
			name := f.dir + "." + functionName(fn)
			lines := f.fset.Position(fn.End()).Line - f.fset.Position(fn.Pos()).Line + 1
			if lines > maxFunction && largeFunctions[name] == "" {
				t.Errorf("%s: %s has %d lines, at most %d are allowed", f.path, functionName(fn), lines, maxFunction)
			}
			used[name] = lines > maxFunction
		}
	}
	for dir, lines := range packages {
		if lines > maxPackage && largePackages[dir] == "" && !testSupport(dir) {
			t.Errorf("package %s has %d lines, at most %d are allowed", dir, lines, maxPackage)
		}
		used[dir] = lines > maxPackage
	}
	for _, table := range []map[string]string{largeFunctions, largeFiles, largePackages} {
		for name := range table {
			if !used[name] {
				t.Errorf("%s needs no exception from the budget any more", name)
			}
		}
	}
}

// functionName is Name, or Type.Name for a method.
func functionName(fn *ast.FuncDecl) string {
	if fn.Recv == nil || len(fn.Recv.List) == 0 {
		return fn.Name.Name
	}
	return receiver(fn.Recv.List[0].Type) + "." + fn.Name.Name
}

func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

func TestPackageNames(t *testing.T) {
	bad := []string{"util", "utils", "common", "helper", "helpers", "type", "types", "manager", "managers", "misc", "lib"}
	for _, f := range code(t) {
		if slices.Contains(bad, f.ast.Name.Name) {
			t.Errorf("%s: package %s: name it for what it provides", f.path, f.ast.Name.Name)
		}
	}
}

func TestPackageVariables(t *testing.T) {
	seen := make(map[string]bool)
	for _, f := range code(t) {
		if testSupport(f.dir) {
			continue
		}
		for _, decl := range f.ast.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				if d.Name.Name == "init" && d.Recv == nil && initFunctions[f.dir] == "" {
					t.Errorf("%s has an init function: build what it builds where it is used", f.path)
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					v, ok := spec.(*ast.ValueSpec)
					if !ok || d.Tok.String() != "var" || embedded(d, v) {
						continue
					}
					for i, name := range v.Names {
						full := f.dir + "." + name.Name
						seen[full] = true
						if name.Name != "_" && !constantLike(v, i) && packageVariables[full] == "" {
							t.Errorf("%s: package variable %s: only errors and compiled constants may be one; put it into a struct", f.path, name.Name)
						}
					}
				}
			}
		}
	}
	for name := range packageVariables {
		if !seen[name] {
			t.Errorf("packageVariables names %s, which does not exist", name)
		}
	}
}

// embedded reports whether a //go:embed line stands over the variable.
func embedded(d *ast.GenDecl, v *ast.ValueSpec) bool {
	for _, doc := range []*ast.CommentGroup{d.Doc, v.Doc} {
		if doc != nil && slices.ContainsFunc(doc.List, func(c *ast.Comment) bool { return strings.HasPrefix(c.Text, "//go:embed") }) {
			return true
		}
	}
	return false
}

// constantLike reports whether the i-th variable is an error or is compiled
// from constants once and has no state of its own.
func constantLike(v *ast.ValueSpec, i int) bool {
	if id, ok := v.Type.(*ast.Ident); ok && id.Name == "error" {
		return true
	}
	if i >= len(v.Values) {
		return false
	}
	call, ok := v.Values[i].(*ast.CallExpr)
	if !ok {
		return false
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	pkg, ok := sel.X.(*ast.Ident)
	return ok && slices.Contains([]string{
		"errors.New", "fmt.Errorf", "errdefs.New", "errdefs.As", "regexp.MustCompile", "template.Must",
		"strings.NewReplacer", "time.Unix", "time.Date", "netip.MustParsePrefix", "netip.MustParseAddr", "big.NewInt",
	}, pkg.Name+"."+sel.Sel.Name)
}
