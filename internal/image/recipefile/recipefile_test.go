package recipefile_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/recipefile"
)

// folder makes a folder with a recipe, and what recipes of these tests name.
func folder(t *testing.T, text string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range map[string]string{
		"web.recipe": text, "app": "a program", "site/index.html": "hello", "site/deep/a": "a", "setup.sh": "echo made\n", "empty": "", "binary": "\xff\xfe",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(
		os.Chmod(filepath.Join(dir, "app"), 0o700),
		os.Symlink("/etc/passwd", filepath.Join(dir, "out")), os.Mkdir(filepath.Join(dir, "linked"), 0o700), os.Symlink("../app", filepath.Join(dir, "linked/app")),
	); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "web.recipe")
}

func TestRead(t *testing.T) {
	r, err := recipefile.Read(folder(t, `# A web server.
packages redis  vim=2:9.0

packages jq
file app /srv/bin/app owner=web mode=4750
file "site"   "/srv/the site" owner=33:34
file app "/usr/local/bin/app"
script setup.sh
user web
size 2G
`))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"redis", "vim=2:9.0", "jq"}, r.Packages); diff != "" || r.User != "web" || r.Script != "echo made\n" || r.DiskBytes != 2<<30 {
		t.Errorf("%+v\n%s", r, diff)
	}
	var b bytes.Buffer
	if err := r.Files.WriteTar(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	type entry struct {
		Name, Content string
		Mode          int64
		UID, GID      int
	}
	var got []entry
	for tr := tar.NewReader(&b); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		content, _ := io.ReadAll(tr)
		got = append(got, entry{h.Name, string(content), h.Mode, h.Uid, h.Gid})
	}
	want := []entry{
		{"srv/bin/app", "a program", 0o4750, 1000, 1000},
		{"srv/the site/", "", 0o755, 33, 34},
		{"srv/the site/deep/", "", 0o755, 33, 34},
		{"srv/the site/deep/a", "a", 0o644, 33, 34},
		{"srv/the site/index.html", "hello", 0o644, 33, 34},
		{"usr/local/bin/app", "a program", 0o755, 0, 0},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestRefusals: each says the line, and what to write instead.
func TestRefusals(t *testing.T) {
	for text, says := range map[string]string{
		"size 2G\npakages vim":            `line 2: unknown key "pakages"; there are packages, user, file, script and size`,
		"packages":                        "line 1: packages: give names",
		"packages Vim":                    `line 1: package "Vim"`,
		"packages --force":                `package "--force"`,
		"user a b":                        "line 1: user: give one name",
		"user root":                       "not root",
		"user Web":                        `user "Web"`,
		"user a\n\nuser b":                "line 3: user is there already",
		"size 12":                         `line 1: size "12": give a number and M, G or T`,
		"size 0G":                         "size",
		"size 99999999T":                  "size",
		"script out":                      "line 1: out: it cannot be read in the recipe's folder",
		"script ../web.recipe":            "recipe's folder",
		"script site":                     "read site",
		"script nothing":                  "no such file in the recipe's folder",
		"script empty":                    "it is empty",
		"script binary":                   "UTF-8",
		"file app":                        "line 1: file: give SOURCE DESTINATION",
		"file app srv":                    "no absolute path",
		"file app /..":                    "no absolute path",
		"file app /a mode=8":              `the mode "8"`,
		"file app /a mode=":               "the mode",
		"file app /a uid=3":               `unknown "uid=3"; there are owner=`,
		"file app /a owner=":              `unknown "owner="`,
		"\nfile app /a owner=web":         `line 2: file app: the owner "web" is neither root nor the recipe's user nor a number`,
		"file app /a owner=4294967295":    "owner",
		"file app /a owner=1:99999999999": "owner",
		"file /etc/passwd /a":             "recipe's folder",
		"file out /a":                     "recipe's folder",
		"file site /a mode=0644":          "it is a folder",
		`file "app /a`:                    "no end",
		`file "" /a`:                      "empty",
	} {
		_, err := recipefile.Read(folder(t, text))
		kind := errdefs.KindOf(err)
		if err == nil || !strings.Contains(err.Error(), says) || kind != errdefs.Invalid && kind != errdefs.NotFound && says != "read site" {
			t.Errorf("%q: %v (%s); want %q", text, err, kind, says)
		}
	}
	if _, err := recipefile.Read(filepath.Join(t.TempDir(), "no", "recipe")); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("%v", err)
	}
	r, err := recipefile.Read(folder(t, "file linked /a"))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Files.WriteTar(t.Context(), io.Discard); !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), "line 1: linked/app: it is a symbolic link") {
		t.Errorf("%v", err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add("packages a\nuser b\nfile app /a owner=b mode=0644\nsize 2G\n")
	f.Add(`file "app" "/a b"`)
	f.Fuzz(func(t *testing.T, text string) {
		r, err := recipefile.Read(folder(t, text))
		if err != nil && !strings.Contains(err.Error(), "recipe") {
			t.Errorf("%v does not say of what", err)
		}
		if err == nil && r.Files != nil {
			_ = r.Files.WriteTar(t.Context(), io.Discard)
		}
	})
}
