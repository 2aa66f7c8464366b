package tree_test

import (
	"archive/tar"
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/oci/ocitest"
	"github.com/holdpoint/holdpoint/internal/oci/tree"
)

func anySize(int64) error { return nil }

func merge(t testing.TB, layers ...[]ocitest.Entry) (*tree.Tree, error) {
	t.Helper()
	files := tree.New(t.TempDir())
	for _, entries := range layers {
		if err := files.AddLayer(bytes.NewReader(ocitest.Layer(t, entries...)), anySize); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// list is one line for each name: its path, and what it is.
func list(t testing.TB, files *tree.Tree) []string {
	t.Helper()
	var lines []string
	err := files.Walk(func(e tree.Entry) error {
		if e.Path == "/" {
			return nil
		}
		line := e.Path
		switch e.Type {
		case tar.TypeDir:
			line += "/"
		case tar.TypeSymlink:
			line += " -> " + e.Target
		case tar.TypeReg:
			data, err := files.ReadFile(e.Path, 1<<20)
			if err != nil {
				return err
			}
			line += " = " + string(data)
			if e.Links > 1 {
				line += fmt.Sprintf(" (%d links)", e.Links)
			}
		default:
			line += fmt.Sprintf(" type %c %d:%d", e.Type, e.Major, e.Minor)
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

type entries = []ocitest.Entry

func TestMerge(t *testing.T) {
	file, dir := ocitest.File, ocitest.Dir
	sym := func(name, to string) ocitest.Entry { return ocitest.Link(tar.TypeSymlink, name, to) }
	hard := func(name, to string) ocitest.Entry { return ocitest.Link(tar.TypeLink, name, to) }
	long := strings.Repeat("long-name/", 20) + strings.Repeat("n", 200)
	tests := []struct {
		name   string
		layers []entries
		want   []string
	}{
		{"nothing", nil, nil},
		{"folders that are not described", []entries{{file("a/b/c", "1")}}, []string{"/a/", "/a/b/", "/a/b/c = 1"}},
		{"./ and / before names", []entries{{dir("./"), file("./a", "1"), file("/b", "2"), file("c//d", "3")}}, []string{"/a = 1", "/b = 2", "/c/", "/c/d = 3"}},
		{"a later file replaces", []entries{{file("a", "1")}, {file("a", "22")}}, []string{"/a = 22"}},
		{"twice in one layer: the last", []entries{{file("a", "1"), file("a", "22")}}, []string{"/a = 22"}},
		{"folders are merged", []entries{{dir("d"), file("d/a", "1")}, {dir("d"), file("d/b", "2")}}, []string{"/d/", "/d/a = 1", "/d/b = 2"}},
		{"file over folder", []entries{{dir("d"), file("d/a", "1")}, {file("d", "f")}}, []string{"/d = f"}},
		{"folder over file", []entries{{file("d", "f")}, {dir("d"), file("d/a", "1")}}, []string{"/d/", "/d/a = 1"}},
		{"link over folder", []entries{{file("d/a", "1")}, {sym("d", "e")}}, []string{"/d -> e"}},
		{"folder over link", []entries{{dir("e"), sym("d", "e")}, {dir("d"), file("d/a", "1")}}, []string{"/d/", "/d/a = 1", "/e/"}},
		{"whiteout", []entries{{file("a", "1"), file("d/b", "2")}, {file(".wh.a", ""), file(".wh.d", "")}}, nil},
		{"whiteout of what is not there", []entries{{file("x/.wh.a", ""), file("a", "1"), file("a/.wh.b", "")}}, []string{"/a = 1"}},
		{"whiteout and new file, both orders", []entries{
			{file("a", "1"), file("b", "1")},
			{file(".wh.a", ""), file("a", "2"), file("b", "2"), file(".wh.b", "")},
		}, []string{"/a = 2", "/b = 2"}},
		{"whiteout of a folder that is made anew", []entries{{file("d/old", "1")}, {file("d/new", "2"), file(".wh.d", "")}}, []string{"/d/", "/d/new = 2"}},
		{"opaque, before and after", []entries{
			{file("d/old", "1"), file("d/e/old", "1"), file("f/old", "1")},
			{file("d/.wh..wh..opq", ""), file("d/e/new", "2"), file("f/new", "2"), file("f/.wh..wh..opq", "")},
		}, []string{"/d/", "/d/e/", "/d/e/new = 2", "/f/", "/f/new = 2"}},
		{"a removed file comes back", []entries{{file("a", "1")}, {file(".wh.a", "")}, {file("a", "3")}}, []string{"/a = 3"}},
		{"aufs' own files", []entries{{dir(".wh..wh.plnk"), file(".wh..wh.plnk/1.2", "x"), file(".wh..wh.aufs", "")}}, nil},
		{"hard links", []entries{{file("a", "1"), hard("d/b", "a"), hard("c", "/d/b")}}, []string{"/a = 1 (3 links)", "/c = 1 (3 links)", "/d/", "/d/b = 1 (3 links)"}},
		{"hard link to a layer below", []entries{{file("a", "1")}, {hard("b", "a")}, {file("a", "3")}}, []string{"/a = 3", "/b = 1"}},
		{"hard link to itself", []entries{{file("a", "1"), hard("a", "a")}}, []string{"/a = 1"}},
		{"through a link to a folder", []entries{{dir("usr/bin"), sym("bin", "usr/bin")}, {file("bin/sh", "1"), hard("bin/dash", "bin/sh")}}, []string{"/bin -> usr/bin", "/usr/", "/usr/bin/", "/usr/bin/dash = 1 (2 links)", "/usr/bin/sh = 1 (2 links)"}},
		{"through a link that leads out", []entries{{sym("d/out", "../../../../etc"), sym("abs", "/etc")}, {file("d/out/a", "1"), file("abs/b", "2")}}, []string{
			"/abs -> /etc", "/d/", "/d/out -> ../../../../etc", "/etc/", "/etc/a = 1", "/etc/b = 2",
		}},
		{"through a link to nowhere", []entries{{sym("a", "b/c")}, {file("a/f", "1")}}, []string{"/a -> b/c", "/b/", "/b/c/", "/b/c/f = 1"}},
		{"whiteout through a link", []entries{{file("e/f", "1"), sym("d", "e")}, {file("d/.wh.f", "")}}, []string{"/d -> e", "/e/"}},
		{"special files", []entries{{
			{Header: tar.Header{Typeflag: tar.TypeChar, Name: "null", Devmajor: 1, Devminor: 3}},
			{Header: tar.Header{Typeflag: tar.TypeBlock, Name: "disk", Devmajor: 259, Devminor: 70000}},
			{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "pipe"}},
		}}, []string{"/disk type 4 259:70000", "/null type 3 1:3", "/pipe type 6 0:0"}},
		{"long names", []entries{{file(long, "1"), sym("l", long)}}, append([]string{"/l -> " + long}, append(parents(long), "/"+long+" = 1")...)},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			files, err := merge(t, test.layers...)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, list(t, files)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func parents(name string) []string {
	var lines []string
	for i, r := range name {
		if r == '/' {
			lines = append(lines, "/"+name[:i]+"/")
		}
	}
	return lines
}

func TestHostileEntries(t *testing.T) {
	file := ocitest.File
	sym := func(name, to string) ocitest.Entry { return ocitest.Link(tar.TypeSymlink, name, to) }
	hard := func(name, to string) ocitest.Entry { return ocitest.Link(tar.TypeLink, name, to) }
	attributes := func(key, value string) ocitest.Entry {
		return ocitest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "a", Format: tar.FormatPAX, PAXRecords: map[string]string{key: value}}}
	}
	tests := []struct {
		name    string
		entries entries
		want    string
	}{
		{"..", entries{file("../a", "")}, "leads out"},
		{".. inside", entries{file("a/../../b", "")}, "leads out"},
		{"absolute ..", entries{file("/../a", "")}, "leads out"},
		{"whiteout of ..", entries{file("d/.wh...", "")}, "whiteout of nothing"},
		{"whiteout of .", entries{file("d/.wh..", "")}, "whiteout of nothing"},
		{"whiteout of nothing", entries{file("d/.wh.", "")}, "whiteout of nothing"},
		{"below a whiteout", entries{file(".wh.d/a", "")}, "below the name of a whiteout"},
		{"file above", entries{file("a", ""), file("a/b", "")}, "no folder"},
		{"links in a circle", entries{sym("a", "b"), sym("b", "a"), file("a/x", "")}, "circle"},
		{"links of many steps", entries{ocitest.Dir("d"), sym("a", strings.Repeat("d/../", 800)), sym("b", strings.Repeat("a/", 3)), file("b/x", "")}, "too long"},
		{"link to itself", entries{sym("a", "a/b"), file("a/x", "")}, "circle"},
		{"hard link to nothing", entries{hard("a", "b")}, "does not exist"},
		{"hard link to itself", entries{hard("a", "a")}, "does not exist"},
		{"hard link outside", entries{hard("a", "../../etc/passwd")}, "leads out"},
		{"hard link to the host", entries{hard("a", "/etc/passwd")}, "does not exist"},
		{"hard link to the host by a link", entries{sym("e", "/etc"), hard("a", "e/passwd")}, "does not exist"},
		{"hard link to a folder", entries{ocitest.Dir("d"), hard("d/a", "d")}, "link to a folder"},
		{"root is a file", entries{file(".", "")}, "is no folder"},
		{"root is a link", entries{sym(".", "/etc")}, "is no folder"},
		{"too deep", entries{file(strings.Repeat("d/", 200)+"a", "")}, "too deep"},
		{"too deep by links", entries{sym("l", strings.Repeat("d/", 100)), sym("l/m", strings.Repeat("d/", 100)), file("l/m/a", "")}, "too deep"},
		{"name too long", entries{file(strings.Repeat("n", 256), "")}, "too long"},
		{"path too long", entries{file(strings.Repeat(strings.Repeat("n", 200)+"/", 16)+"a", "")}, "too long"},
		{"link to nothing", entries{sym("a", strings.Repeat("n", 5000))}, "none"},
		{"device", entries{{Header: tar.Header{Typeflag: tar.TypeChar, Name: "a", Devmajor: 1 << 12}}}, "cannot number"},
		{"unknown type", entries{{Header: tar.Header{Typeflag: 'V', Name: "a"}}}, "unknown"},
		{"no owner", entries{{Header: tar.Header{Typeflag: tar.TypeReg, Name: "a", Uid: 1<<32 - 1}}}, "owner"},
		{"too many attributes", entries{attributes("SCHILY.xattr.user.a", strings.Repeat("x", 70_000))}, "attributes"},
		{"long attribute", entries{attributes("SCHILY.xattr.user."+strings.Repeat("n", 300), "x")}, "attributes"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := merge(t, test.entries)
			if err == nil || !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v of kind %s, want %q", err, errdefs.KindOf(err), test.want)
			}
		})
	}
}

func TestAttributes(t *testing.T) {
	when := time.Unix(1_500_000_000, 123_000_000)
	first := ocitest.Entry{Header: tar.Header{
		Typeflag: tar.TypeReg, Name: "a", Mode: 0o6755, Uid: 1000, Gid: 4_000_000_000, ModTime: when, Format: tar.FormatPAX,
		PAXRecords: map[string]string{
			"SCHILY.xattr.security.capability": "\x01\x00\x00\x02", "SCHILY.xattr.user.note": "n",
			"SCHILY.xattr.trusted.overlay.opaque": "y", "SCHILY.xattr.com.apple.x": "z",
		},
	}, Content: "x"}
	old := ocitest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "old", ModTime: time.Unix(1<<40, 0), Format: tar.FormatGNU}}
	top := ocitest.Entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o700, Uid: 7, Gid: 8, ModTime: when, Format: tar.FormatPAX}}
	files, err := merge(t, entries{first, old, top})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]tree.Attributes{}
	if err := files.Walk(func(e tree.Entry) error { got[e.Path] = e.Attributes; return nil }); err != nil {
		t.Fatal(err)
	}
	want := map[string]tree.Attributes{
		"/": {Type: tar.TypeDir, Mode: 0o700, UID: 7, GID: 8, ModTime: when},
		"/a": {
			Type: tar.TypeReg, Mode: 0o6755, UID: 1000, GID: 4_000_000_000, ModTime: when, Size: 1,
			Xattrs: map[string]string{"security.capability": "\x01\x00\x00\x02", "user.note": "n"},
		},
		"/old": {Type: tar.TypeReg, ModTime: time.Unix(0, 0)},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestPlace(t *testing.T) {
	scratch, dir := t.TempDir(), t.TempDir()
	files := tree.New(scratch)
	sparse := strings.Repeat("\x00", 3<<20) + "end" + strings.Repeat("\x00", 600<<10)
	layer := ocitest.Layer(t,
		ocitest.Entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: "d", Mode: 0o000}},
		ocitest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "d/a", Mode: 0o4000}, Content: "1"},
		ocitest.Link(tar.TypeLink, "d/b", "d/a"), ocitest.Link(tar.TypeLink, "c", "d/a"),
		ocitest.File("empty", ""), ocitest.Link(tar.TypeLink, "empty2", "empty"),
		ocitest.Link(tar.TypeSymlink, "s", "/nowhere"), ocitest.Link(tar.TypeLink, "s2", "s"),
		ocitest.File("holes", sparse),
		ocitest.Entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: "dev", Devmajor: 1, Devminor: 3}},
		ocitest.Entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "pipe"}},
		ocitest.File("removed", "x"), ocitest.File("removed", ""),
	)
	if err := files.AddLayer(bytes.NewReader(layer), anySize); err != nil {
		t.Fatal(err)
	}
	if err := files.Place(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	inode := func(name string) uint64 {
		info, err := os.Lstat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return info.Sys().(*syscall.Stat_t).Ino
	}
	if inode("c") != inode("d/a") || inode("c") != inode("d/b") || inode("empty") != inode("empty2") || inode("s") != inode("s2") || inode("s") == inode("c") {
		t.Error("hard links are not")
	}
	for name, want := range map[string]string{"d/b": "1", "empty2": "", "holes": sparse, "removed": ""} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || string(data) != want {
			t.Errorf("%s: %d bytes, want %d (%v)", name, len(data), len(want), err)
		}
	}
	for name, mode := range map[string]fs.FileMode{"d": 0o700 | fs.ModeDir, "d/a": 0o600, "pipe": 0o600 | fs.ModeNamedPipe} {
		info, err := os.Lstat(filepath.Join(dir, name))
		if err != nil || info.Mode() != mode {
			t.Errorf("%s: %v (%v)", name, info, err)
		}
	}
	if to, err := os.Readlink(filepath.Join(dir, "s2")); err != nil || to != "/nowhere" {
		t.Errorf("link to %q (%v)", to, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "dev")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a device was made: %v", err)
	}
	left, err := os.ReadDir(scratch)
	if err != nil || len(left) != 1 { // the first content of "removed"
		t.Errorf("left in scratch: %v (%v)", left, err)
	}
}

func TestReadFile(t *testing.T) {
	files, err := merge(t, entries{
		ocitest.File("etc/real", "text"), ocitest.Link(tar.TypeSymlink, "etc/link", "../../../etc/real"), ocitest.Link(tar.TypeSymlink, "e", "/etc"),
		ocitest.Link(tar.TypeSymlink, "loop", "loop"), ocitest.Link(tar.TypeSymlink, "host", "/etc/hostname"), ocitest.Dir("d"), ocitest.File("empty", ""),
	})
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, want string
		kind       errdefs.Kind
	}{
		{"/etc/real", "text", ""},
		{"etc/link", "text", ""},
		{"/e/link", "text", ""},
		{"/empty", "", ""},
		{"/nothing", "", errdefs.NotFound},
		{"/host", "", errdefs.NotFound},
		{"/etc/real/x", "", errdefs.Invalid},
		{"/d", "", errdefs.Invalid},
		{"/", "", errdefs.Invalid},
		{"/loop", "", errdefs.Invalid},
	}
	for _, test := range tests {
		data, err := files.ReadFile(test.name, 4)
		if string(data) != test.want || errdefs.KindOf(err) != test.kind {
			t.Errorf("%s: got %q, %v", test.name, data, err)
		}
	}
	if _, err := files.ReadFile("/etc/real", 3); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("a file that is too long: %v", err)
	}
}

func TestUser(t *testing.T) {
	files, err := merge(t, entries{
		ocitest.File("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nbad line\nweb:x:33:34:web:/var/www:/bin/sh\n1000:x:5:5::/five:\nneg:x:-1:0::/:\nsmall:x:7:7::\n"),
		ocitest.File("etc/group", "root:x:0:\nstaff:x:50:web,other\naudio:x:29:other,web\nbad\nnum:x:zz:web\n"),
	})
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		spec string
		want tree.User
		kind errdefs.Kind
	}{
		{"", tree.User{Name: "root", Home: "/root"}, ""},
		{"root", tree.User{Name: "root", Home: "/root"}, ""},
		{"web", tree.User{Name: "web", UID: 33, GID: 34, Groups: []uint32{29, 50}, Home: "/var/www"}, ""},
		{"33", tree.User{Name: "web", UID: 33, GID: 34, Groups: []uint32{29, 50}, Home: "/var/www"}, ""},
		{"web:staff", tree.User{Name: "web", UID: 33, GID: 50, Home: "/var/www"}, ""},
		{"web:99", tree.User{Name: "web", UID: 33, GID: 99, Home: "/var/www"}, ""},
		{"web:", tree.User{Name: "web", UID: 33, GID: 34, Groups: []uint32{29, 50}, Home: "/var/www"}, ""},
		{"2000", tree.User{UID: 2000, Home: "/"}, ""},
		{"2000:3000", tree.User{UID: 2000, GID: 3000, Home: "/"}, ""},
		{"1000", tree.User{Name: "1000", UID: 5, GID: 5, Home: "/five"}, ""},
		{"nobody", tree.User{}, errdefs.NotFound},
		{"neg", tree.User{}, errdefs.NotFound},
		{"small", tree.User{Name: "small", UID: 7, GID: 7, Home: "/"}, ""},
		{"web:nogroup", tree.User{Name: "web", UID: 33, Home: "/var/www"}, errdefs.NotFound},
		{"4294967295", tree.User{}, errdefs.NotFound},
		{"-1", tree.User{}, errdefs.NotFound},
	}
	for _, test := range tests {
		got, err := files.User(test.spec)
		if diff := cmp.Diff(test.want, got); diff != "" || errdefs.KindOf(err) != test.kind {
			t.Errorf("%q: %v %s", test.spec, err, diff)
		}
	}
	none, err := merge(t)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := none.User(""); err != nil || got.UID != 0 || got.Home != "/" {
		t.Errorf("root of an empty image: %+v, %v", got, err)
	}
}

// repeated gives p n times.
type repeated struct {
	p    []byte
	n    int
	left []byte
}

func (r *repeated) Read(p []byte) (int, error) {
	if len(r.left) == 0 {
		if r.n == 0 {
			return 0, io.EOF
		}
		r.n--
		r.left = r.p
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}

func TestLimits(t *testing.T) {
	if testing.Short() {
		t.Skip("some seconds of headers")
	}
	folder := ocitest.Layer(t, ocitest.Dir("d"))[:512]
	value := strings.Repeat("x", 1<<20-1000)
	fat := ocitest.Layer(t, ocitest.Entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: "d", Format: tar.FormatPAX, PAXRecords: map[string]string{"X.x": value}}})
	tests := []struct {
		name  string
		layer io.Reader
		want  string
	}{
		{"entries", &repeated{p: folder, n: 1_000_001}, "more than 1000000 files"},
		{"headers", &repeated{p: fat[:len(fat)-1024], n: 260}, "bytes of names and attributes"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			err := tree.New(t.TempDir()).AddLayer(bufio.NewReaderSize(test.layer, 64<<10), anySize)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestSparse reads what GNU tar makes of a file with holes, in each format.
func TestSparse(t *testing.T) {
	if _, err := exec.LookPath("tar"); err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "a"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, off := range []int64{1 << 20, 3 << 20, 3<<20 + 300<<10} {
		if _, err := f.WriteAt([]byte("data"), off); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"--format=gnu", "--format=posix --sparse-version=0.0", "--format=posix --sparse-version=0.1", "--format=posix --sparse-version=1.0"} {
		args := append(strings.Fields(format), "-C", dir, "-cSf", "-", "a")
		layer, err := exec.CommandContext(t.Context(), "tar", args...).Output()
		if err != nil {
			t.Fatal(err)
		}
		if len(layer) > 1<<20 {
			t.Logf("%s: no holes in %d bytes", format, len(layer))
		}
		files, placed := tree.New(t.TempDir()), t.TempDir()
		if err := files.AddLayer(bytes.NewReader(layer), anySize); err != nil {
			t.Fatalf("%s: %v", format, err)
		}
		got, err := files.ReadFile("a", 10<<20)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes, %v", format, len(got), err)
		}
		if err := files.Place(t.Context(), placed); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(filepath.Join(placed, "a"))
		if err != nil || info.Size() != int64(len(want)) || info.Sys().(*syscall.Stat_t).Blocks*512 > 2<<20 {
			t.Errorf("%s: placed as %v, %v", format, info, err)
		}
	}
}
