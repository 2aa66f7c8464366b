package tarstream_test

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/tarstream"
)

func pack(t *testing.T, name string) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := tarstream.Pack(context.Background(), &b, name); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func write(t *testing.T, name, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestTree(t *testing.T) {
	src := filepath.Join(t.TempDir(), "tree")
	write(t, filepath.Join(src, "a/script"), "#!/bin/sh\n")
	write(t, filepath.Join(src, "a/empty"), "")
	write(t, filepath.Join(src, "big"), strings.Repeat("0123456789", 100_000))
	if err := os.Chmod(filepath.Join(src, "a/script"), 0o751); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../big", filepath.Join(src, "a/link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(src, "big"), filepath.Join(src, "same")); err != nil {
		t.Fatal(err)
	}
	stamp := time.Unix(1_600_000_000, 123_456_789)
	for _, name := range []string{"a/script", "big", "a", "."} {
		if err := os.Chtimes(filepath.Join(src, name), stamp, stamp); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(src, "a"), 0o550); err != nil {
		t.Fatal(err)
	}
	defer os.Chmod(filepath.Join(src, "a"), 0o755)

	dst := filepath.Join(t.TempDir(), "copy")
	res, err := tarstream.UnpackAs(context.Background(), bytes.NewReader(pack(t, src)), dst, tarstream.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer os.Chmod(filepath.Join(dst, "a"), 0o755)
	if res.Files != 7 || res.Bytes != 1_000_010 {
		t.Errorf("result %+v", res)
	}
	for _, name := range []string{"a/script", "big", "a", "."} {
		fi, err := os.Stat(filepath.Join(dst, name))
		if err != nil {
			t.Fatal(err)
		}
		want, _ := os.Stat(filepath.Join(src, name))
		if !fi.ModTime().Equal(stamp) || fi.Mode() != want.Mode() {
			t.Errorf("%s: %v %v, want %v %v", name, fi.ModTime(), fi.Mode(), stamp, want.Mode())
		}
	}
	if got, _ := os.Readlink(filepath.Join(dst, "a/link")); got != "../big" {
		t.Errorf("link leads to %q", got)
	}
	big, _ := os.Stat(filepath.Join(dst, "big"))
	same, _ := os.Stat(filepath.Join(dst, "same"))
	if !os.SameFile(big, same) || read(t, filepath.Join(dst, "same")) != read(t, filepath.Join(src, "big")) {
		t.Error("the hard link is none, or its content differs")
	}
}

func TestLikeCp(t *testing.T) {
	for _, tc := range []struct {
		name, src, dst string
		want           string // path of the file "f" or "d/f" afterwards
		kind           errdefs.Kind
	}{
		{"file to new name", "f", "new", "new", ""},
		{"file onto file", "f", "old", "old", ""},
		{"file into folder", "f", "dir", "dir/f", ""},
		{"file into folder with slash", "f", "dir/", "dir/f", ""},
		{"file into missing folder", "f", "missing/", "", errdefs.NotFound},
		{"file below missing folder", "f", "missing/x", "", errdefs.NotFound},
		{"file through link to folder", "f", "todir", "dir/f", ""},
		{"file through link to file", "f", "toold", "old", ""},
		{"file through dead link", "f", "dead", "", errdefs.Invalid},
		{"linked file", "lf", "new", "new", ""},
		{"folder to new name", "d", "new", "new/f", ""},
		{"folder to new name with slash", "d", "new/", "new/f", ""},
		{"folder into folder", "d", "dir", "dir/d/f", ""},
		{"folder with slash into folder", "d/", "dir", "dir/d/f", ""},
		{"folder onto file", "d", "old", "", errdefs.Invalid},
		{"content into folder", "d/.", "dir", "dir/f", ""},
		{"content to new name", "d/.", "new", "new/f", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			src, dst := t.TempDir(), t.TempDir()
			write(t, filepath.Join(src, "f"), "content")
			write(t, filepath.Join(src, "d/f"), "content")
			write(t, filepath.Join(dst, "old"), "before")
			write(t, filepath.Join(dst, "dir/other"), "other")
			_ = os.Symlink("f", filepath.Join(src, "lf"))
			_ = os.Symlink("dir", filepath.Join(dst, "todir"))
			_ = os.Symlink("old", filepath.Join(dst, "toold"))
			_ = os.Symlink("nowhere", filepath.Join(dst, "dead"))
			archive := pack(t, src+"/"+tc.src)
			_, err := tarstream.UnpackAs(context.Background(), bytes.NewReader(archive), dst+"/"+tc.dst, tarstream.Options{})
			if errdefs.KindOf(err) != tc.kind {
				t.Fatalf("error %v, want kind %q", err, tc.kind)
			}
			if tc.want != "" && read(t, filepath.Join(dst, tc.want)) != "content" {
				t.Error("the content differs")
			}
			if read(t, filepath.Join(dst, "dir/other")) != "other" {
				t.Error("a bystander was changed")
			}
		})
	}
}

// archive builds one by hand, as an attacker would.
func archive(t *testing.T, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		if h.Typeflag == tar.TypeReg && h.Size == 0 {
			h.Size = 4
		}
		h.Mode |= 0o644
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			_, _ = w.Write(bytes.Repeat([]byte("evil"), int(h.Size+3)/4)[:h.Size])
		}
	}
	_ = w.Close()
	return b.Bytes()
}

func TestHostileArchives(t *testing.T) {
	file := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }
	sparse := func(size, m string) tar.Header {
		h := file("s")
		h.Format = tar.FormatPAX
		h.PAXRecords = map[string]string{"HOLDPOINT.size": size, "HOLDPOINT.sparse": m}
		return h
	}
	for name, entries := range map[string][]tar.Header{
		"parent":            {file("../victim")},
		"hidden parent":     {file("a/../../victim")},
		"absolute":          {file("/tmp/victim")},
		"through a link":    {{Typeflag: tar.TypeSymlink, Name: "l", Linkname: ".."}, file("l/victim")},
		"through abs link":  {{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "/"}, file("l/victim")},
		"link inside":       {{Typeflag: tar.TypeDir, Name: "d/"}, {Typeflag: tar.TypeSymlink, Name: "l", Linkname: "d"}, file("l/x")},
		"folder to link":    {{Typeflag: tar.TypeSymlink, Name: "l", Linkname: ".."}, {Typeflag: tar.TypeDir, Name: "l/"}, file("l/victim")},
		"hard link out":     {{Typeflag: tar.TypeLink, Name: "h", Linkname: "../victim"}},
		"hard link by link": {{Typeflag: tar.TypeSymlink, Name: "l", Linkname: ".."}, {Typeflag: tar.TypeLink, Name: "h", Linkname: "l/victim"}},
		"hard link itself":  {file("h"), {Typeflag: tar.TypeLink, Name: "h", Linkname: "h"}},
		"file over folder":  {{Typeflag: tar.TypeDir, Name: "d/"}, file("d")},
		"folder over file":  {file("d"), {Typeflag: tar.TypeDir, Name: "d/"}},
		"pieces overlap":    {sparse("8", "0,2,1,2")},
		"pieces backwards":  {sparse("8", "4,2,0,2")},
		"pieces outside":    {sparse("3", "0,4")},
		"pieces too few":    {sparse("8", "0,2")},
		"pieces overflow":   {sparse("9223372036854775807", "9223372036854775807,4")},
		"negative":          {sparse("-1", "0,4")},
		"no numbers":        {sparse("8", "0,x")},
		"too many bytes":    {{Typeflag: tar.TypeReg, Name: "b", Size: 2000}},
		"too many files":    {file("1"), file("2"), file("3"), file("4"), file("5"), file("6"), file("7"), file("8"), file("9")},
	} {
		t.Run(name, func(t *testing.T) {
			outer := t.TempDir()
			write(t, filepath.Join(outer, "victim"), "untouched")
			dir := filepath.Join(outer, "dir")
			_, err := tarstream.Unpack(context.Background(), bytes.NewReader(archive(t, entries...)), dir,
				tarstream.Options{MaxBytes: 1000, MaxFiles: 8})
			if err == nil {
				t.Error("it was accepted")
			}
			if strings.ContainsRune(err.Error(), '\n') {
				t.Errorf("error of several lines: %q", err)
			}
			if read(t, filepath.Join(outer, "victim")) != "untouched" {
				t.Error("a file outside was changed")
			}
			if list, _ := os.ReadDir(outer); len(list) != 2 {
				t.Errorf("outside there is now %v", list)
			}
		})
	}
}

// TestReplaceKeepsLinkTargets: what is called like an entry is replaced and
// never written through, be it a symbolic or a hard link.
func TestReplaceKeepsLinkTargets(t *testing.T) {
	outer := t.TempDir()
	dir := filepath.Join(outer, "dir")
	write(t, filepath.Join(outer, "target"), "untouched")
	write(t, filepath.Join(dir, "x"), "")
	_ = os.Symlink("../target", filepath.Join(dir, "soft"))
	if err := os.Link(filepath.Join(outer, "target"), filepath.Join(dir, "hard")); err != nil {
		t.Fatal(err)
	}
	a := archive(t, tar.Header{Typeflag: tar.TypeReg, Name: "soft"}, tar.Header{Typeflag: tar.TypeReg, Name: "hard"})
	if _, err := tarstream.Unpack(context.Background(), bytes.NewReader(a), dir, tarstream.Options{}); err != nil {
		t.Fatal(err)
	}
	if read(t, filepath.Join(outer, "target")) != "untouched" || read(t, filepath.Join(dir, "soft")) != "evil" {
		t.Error("written through a link")
	}
}

func TestCutOff(t *testing.T) {
	src := filepath.Join(t.TempDir(), "f")
	write(t, src, strings.Repeat("x", 100_000))
	whole := pack(t, src)
	for _, n := range []int{0, 100, 600, 2000, 50_000} {
		dir := t.TempDir()
		_, err := tarstream.UnpackAs(context.Background(), bytes.NewReader(whole[:n]), dir, tarstream.Options{})
		if !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%d bytes: error %v", n, err)
		}
		if list, _ := os.ReadDir(dir); len(list) != 0 {
			t.Errorf("%d bytes: %v is left", n, list)
		}
	}
}

// TestCutOffBetweenEntries: an archive that lacks nothing but its end mark is
// cut off, whatever the last entry ends with.
func TestCutOffBetweenEntries(t *testing.T) {
	ctx := context.Background()
	for name, last := range map[string]tar.Header{
		"file":   {Typeflag: tar.TypeReg, Name: "b", Size: 1},
		"block":  {Typeflag: tar.TypeReg, Name: "b", Size: 512},
		"zeros":  {Typeflag: tar.TypeReg, Name: "b", Size: 512 * 3},
		"folder": {Typeflag: tar.TypeDir, Name: "b/"},
		"pax":    {Typeflag: tar.TypeReg, Name: strings.Repeat("b", 200), Size: 4, Format: tar.FormatPAX},
	} {
		t.Run(name, func(t *testing.T) {
			whole := archive(t, tar.Header{Typeflag: tar.TypeDir, Name: "top/"}, tar.Header{Typeflag: tar.TypeReg, Name: "top/a"}, last)
			bare := whole[:len(whole)-1024]
			if name == "zeros" {
				clear(bare[len(bare)-512*3:])
			}
			for _, cut := range [][]byte{bare, bare[:512], nil} {
				if _, err := tarstream.Unpack(ctx, bytes.NewReader(cut), t.TempDir(), tarstream.Options{}); !errdefs.Is(err, errdefs.Invalid) {
					t.Errorf("unpack %d of %d bytes: %v", len(cut), len(whole), err)
				}
				if _, err := tarstream.Plain(ctx, io.Discard, bytes.NewReader(cut)); !errdefs.Is(err, errdefs.Invalid) {
					t.Errorf("copy %d of %d bytes: %v", len(cut), len(whole), err)
				}
				if _, err := tarstream.UnpackAs(ctx, bytes.NewReader(cut), t.TempDir(), tarstream.Options{}); !errdefs.Is(err, errdefs.Invalid) {
					t.Errorf("unpack as %d of %d bytes: %v", len(cut), len(whole), err)
				}
			}
			for _, mark := range []int{512, 1024, 10240} {
				ended := append(bytes.Clone(bare), make([]byte, mark)...)
				if _, err := tarstream.Unpack(ctx, bytes.NewReader(ended), t.TempDir(), tarstream.Options{}); err != nil {
					t.Errorf("a mark of %d bytes: %v", mark, err)
				}
			}
		})
	}
}

// TestCutOffAnywhere: no beginning of what Pack writes is taken for all of it.
func TestCutOffAnywhere(t *testing.T) {
	src := t.TempDir()
	for _, name := range []string{"a", "b/c", strings.Repeat("n", 200)} {
		write(t, filepath.Join(src, name), strings.Repeat("\x00", 700))
	}
	whole := pack(t, src)
	for n := 0; n <= len(whole)-1024; n += 256 {
		if _, err := tarstream.Unpack(context.Background(), bytes.NewReader(whole[:n]), t.TempDir(), tarstream.Options{}); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%d of %d bytes: %v", n, len(whole), err)
		}
	}
}

// TestOtherPrograms reads what other programs write.
func TestOtherPrograms(t *testing.T) {
	src := t.TempDir()
	write(t, filepath.Join(src, "a"), "content")
	write(t, filepath.Join(src, "b/c"), strings.Repeat("\x00", 1<<20)+"end")
	for _, argv := range [][]string{
		{"tar", "cf", "-", "."},
		{"tar", "cSf", "-", "."},
		{"tar", "-b", "1", "-cf", "-", "."},
		{"tar", "-H", "gnu", "-cSf", "-", "."},
		{"tar", "cf", "-", "-T", "/dev/null"},
		{"bsdtar", "cf", "-", "."},
		{"busybox", "tar", "cf", "-", "."},
		{"python3", "-c", "import sys,tarfile\nwith tarfile.open(fileobj=sys.stdout.buffer, mode='w|') as t: t.add('.')"},
	} {
		if _, err := exec.LookPath(argv[0]); err != nil {
			continue
		}
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Dir = src
		out, err := cmd.Output()
		if err == nil {
			_, err = tarstream.Unpack(context.Background(), bytes.NewReader(out), t.TempDir(), tarstream.Options{})
		}
		if err != nil {
			t.Errorf("%q: %v", argv, err)
		}
	}
}

func TestCancel(t *testing.T) {
	src := filepath.Join(t.TempDir(), "f")
	write(t, src, "x")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := tarstream.Pack(ctx, io.Discard, src); err != context.Canceled {
		t.Errorf("pack: %v", err)
	}
	if _, err := tarstream.UnpackAs(ctx, bytes.NewReader(pack(t, src)), t.TempDir(), tarstream.Options{}); err != context.Canceled {
		t.Errorf("unpack: %v", err)
	}
}

func FuzzUnpack(f *testing.F) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	_ = w.WriteHeader(&tar.Header{
		Format: tar.FormatPAX, Typeflag: tar.TypeReg, Name: "s", Size: 2, Mode: 0o600,
		PAXRecords: map[string]string{"HOLDPOINT.size": "9", "HOLDPOINT.sparse": "1,2"},
	})
	_, _ = w.Write([]byte("ab"))
	_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: "l", Linkname: ".."})
	_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "l/x"})
	_ = w.Close()
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, a []byte) {
		outer := t.TempDir()
		dir := filepath.Join(outer, "dir")
		_, _ = tarstream.Unpack(context.Background(), bytes.NewReader(a), dir, tarstream.Options{MaxBytes: 1 << 20, MaxFiles: 100})
		if list, _ := os.ReadDir(outer); len(list) != 1 {
			t.Fatalf("outside there is now %v", list)
		}
	})
}
