package tarstream_test

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/tarstream"
)

// An archive with holes becomes one that archive/tar alone reads.
func TestPlain(t *testing.T) {
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "holes"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("in the middle"), 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(3 << 20); err != nil {
		t.Fatal(err)
	}
	f.Close()
	want, _ := os.ReadFile(f.Name())
	if err := os.Symlink("holes", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	var packed, plain bytes.Buffer
	if err := tarstream.Pack(t.Context(), &packed, dir+"/."); err != nil {
		t.Fatal(err)
	}
	res, err := tarstream.Plain(t.Context(), &plain, &packed)
	if err != nil || res.Files != 3 {
		t.Fatalf("%+v, %v", res, err)
	}
	r, found := tar.NewReader(&plain), map[string]string{}
	for {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil || len(h.PAXRecords) > 1 {
			t.Errorf("%s: %v, %v", h.Name, h.PAXRecords, err)
		}
		found[filepath.Clean(h.Name)] = string(data) + h.Linkname
	}
	if found["holes"] != string(want) || found["link"] != "holes" {
		t.Errorf("%d bytes, link to %q", len(found["holes"]), found["link"])
	}
}

// What a hostile guest sends does not get past it.
func TestPlainRefuses(t *testing.T) {
	for name, h := range map[string]tar.Header{
		"leads out":      {Name: "../x", Typeflag: tar.TypeReg},
		"absolute":       {Name: "/etc/x", Typeflag: tar.TypeReg},
		"link leads out": {Name: "x", Linkname: "../../etc/passwd", Typeflag: tar.TypeLink},
		"wrong map": {Name: "x", Typeflag: tar.TypeReg, Format: tar.FormatPAX, PAXRecords: map[string]string{
			"HOLDPOINT.size": "5", "HOLDPOINT.sparse": "9,9",
		}},
	} {
		var packed bytes.Buffer
		w := tar.NewWriter(&packed)
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		w.Close()
		if _, err := tarstream.Plain(t.Context(), io.Discard, &packed); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	var packed, plain bytes.Buffer
	w := tar.NewWriter(&packed)
	for _, h := range []tar.Header{{Name: "null", Typeflag: tar.TypeChar, Devmajor: 1}, {Name: "su", Typeflag: tar.TypeReg, Mode: 0o6755}} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	res, err := tarstream.Plain(t.Context(), &plain, &packed)
	if err != nil || res.Files != 1 || res.Skipped != 1 {
		t.Errorf("%+v, %v", res, err)
	}
	if h, err := tar.NewReader(&plain).Next(); err != nil || h.Name != "su" || h.Mode != 0o755 {
		t.Errorf("%+v, %v", h, err)
	}
	if _, err := tarstream.Plain(t.Context(), io.Discard, bytes.NewReader([]byte("no archive at all, but long enough to be read as a header of one"))); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("no archive: %v", err)
	}
}
