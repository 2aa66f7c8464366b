package tree_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/oci/ocitest"
	"github.com/holdpoint/holdpoint/internal/oci/tree"
)

// FuzzAddLayer merges layers of arbitrary bytes.
func FuzzAddLayer(f *testing.F) {
	f.Add(ocitest.Layer(f, ocitest.Dir("d"), ocitest.File("d/a", "1")))
	f.Add(ocitest.Layer(f, ocitest.Entry{Header: tar.Header{
		Typeflag: tar.TypeReg, Name: "d/a", Uid: 1 << 30, Format: tar.FormatPAX, PAXRecords: map[string]string{"SCHILY.xattr.user.a": "b"},
	}}))
	f.Add(ocitest.Layer(f, ocitest.File(strings.Repeat("long/", 40)+"x", "1"))[:1024])
	f.Fuzz(func(t *testing.T, layer []byte) { mergeAndPlace(t, layer, layer) })
}

// FuzzMerge merges layers that a text describes: a line is a type of entry, a
// name and a target, and a line without a name begins the next layer.
func FuzzMerge(f *testing.F) {
	f.Add("d d\nf d/a\ns l /d\ns up ../../..\nh h d/a\nc dev\np pipe\n-\nf d/.wh..wh..opq\nf l/b\nf .wh.h")
	f.Add("s up ../../..\nf up/x\nf up/../x\n-\ns d d\nf d/x")
	f.Add("f d/a\nf h\ns l d\n-\nf d\nd h\nh h/i l/a\n-\nd d\nf .wh.d\nh x h/i")
	f.Add("s a b/c\nf a/f\n-\nf .wh.b\nf a/g\nd .\nf b/.wh..wh..opq\nh a/h a/g")
	f.Fuzz(func(t *testing.T, text string) {
		var layers [][]byte
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for line := range strings.SplitSeq(text+"\n-", "\n") {
			fields := strings.SplitN(line, " ", 3)
			if len(fields) < 2 {
				w.Close()
				layers = append(layers, bytes.Clone(b.Bytes()))
				b.Reset()
				w = tar.NewWriter(&b)
				continue
			}
			kinds := map[string]byte{"f": tar.TypeReg, "d": tar.TypeDir, "s": tar.TypeSymlink, "h": tar.TypeLink, "c": tar.TypeChar, "b": tar.TypeBlock, "p": tar.TypeFifo}
			h := tar.Header{Typeflag: kinds[fields[0]], Name: fields[1]}
			if len(fields) > 2 {
				h.Linkname = fields[2]
			}
			_ = w.WriteHeader(&h) // what cannot be written is left out
		}
		mergeAndPlace(t, layers...)
	})
}

// mergeAndPlace finds out that the tree that comes of the layers, whatever they
// say, has only names that stay in it, and that what is placed on disk is the
// same tree.
func mergeAndPlace(t *testing.T, layers ...[]byte) {
	top := t.TempDir()
	scratch, dir := filepath.Join(top, "scratch"), filepath.Join(top, "tree")
	if err := errors.Join(os.Mkdir(scratch, 0o700), os.Mkdir(dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	files := tree.New(scratch)
	left := int64(1 << 20)
	charge := func(size int64) error {
		if left -= size; left < 0 {
			return errors.New("too large")
		}
		return nil
	}
	for _, layer := range layers {
		if err := files.AddLayer(bytes.NewReader(layer), charge); err != nil {
			return
		}
	}
	want := map[string]byte{}
	err := files.Walk(func(e tree.Entry) error {
		if e.Path != filepath.Clean(e.Path) || !filepath.IsAbs(e.Path) {
			t.Errorf("the path %q is not clean", e.Path)
		}
		want[e.Path] = e.Type
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := files.User("root"); err != nil && strings.Contains(err.Error(), "\n") {
		t.Errorf("an error of several lines: %v", err)
	}
	if err := files.Place(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name = filepath.Join("/", strings.TrimPrefix(name, dir))
		kind, ok := want[name]
		if !ok || d.IsDir() != (kind == tar.TypeDir) || (d.Type() == fs.ModeSymlink) != (kind == tar.TypeSymlink) {
			t.Errorf("%q is on disk as %v and in the tree as %q", name, d.Type(), kind)
		}
		delete(want, name)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, kind := range want {
		if kind != tar.TypeChar && kind != tar.TypeBlock {
			t.Errorf("%q of type %q is not on disk", name, kind)
		}
	}
	if outside, err := os.ReadDir(top); err != nil || len(outside) != 2 {
		t.Errorf("outside of the tree there is %v (%v)", outside, err)
	}
}
