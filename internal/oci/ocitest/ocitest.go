// Package ocitest makes container images for tests, well-formed ones that a
// test may then damage. It is no writer of images for anybody else.
package ocitest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

// Entry is an entry of a layer; its size is that of Content.
type Entry struct {
	tar.Header
	Content string
}

// File is an entry for a regular file of root's with the mode 0644.
func File(name, content string) Entry {
	return Entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, content}
}

// Dir is an entry for a folder of root's with the mode 0755.
func Dir(name string) Entry {
	return Entry{tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755}, ""}
}

// Link is an entry of the type tar.TypeSymlink or tar.TypeLink.
func Link(kind byte, name, target string) Entry {
	return Entry{tar.Header{Typeflag: kind, Name: name, Linkname: target, Mode: 0o777}, ""}
}

// Layer makes a tar.
func Layer(t testing.TB, entries ...Entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := e.Header
		h.Size = int64(len(e.Content))
		if h.ModTime.IsZero() {
			h.ModTime = time.Unix(1_600_000_000, 0)
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.Content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Gzip compresses a layer.
func Gzip(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Zstd compresses a layer.
func Zstd(t testing.TB, data []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	return w.EncodeAll(data, nil)
}

// Object is a JSON object.
type Object = map[string]any

// Layout is the files of an image by their paths in the layout.
type Layout map[string][]byte

// Digest is data's sha256.
func Digest(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Blob adds a blob and returns its descriptor.
func (l Layout) Blob(mediaType string, data []byte) Object {
	l["blobs/"+strings.Replace(Digest(data), ":", "/", 1)] = data
	return Object{"mediaType": mediaType, "digest": Digest(data), "size": len(data)}
}

// JSON encodes v.
func JSON(t testing.TB, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// ConfigOf makes the config of an image for linux/amd64 of unpacked layers.
func ConfigOf(config Object, layers ...[]byte) Object {
	ids := []string{}
	for _, l := range layers {
		ids = append(ids, Digest(l))
	}
	return Object{"os": "linux", "architecture": "amd64", "config": config, "rootfs": Object{"type": "layers", "diff_ids": ids}}
}

// Manifest adds a config and layers, each packed by pack (nil for not at all),
// and returns the manifest's descriptor.
func (l Layout) Manifest(t testing.TB, config Object, pack func(testing.TB, []byte) []byte, layers ...[]byte) Object {
	t.Helper()
	mediaType := "application/vnd.oci.image.layer.v1.tar"
	var descriptors []Object
	for _, data := range layers {
		if pack != nil {
			data = pack(t, data)
		}
		descriptors = append(descriptors, l.Blob(mediaType, data))
	}
	return l.Blob("application/vnd.oci.image.manifest.v1+json", JSON(t, Object{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
		"config": l.Blob("application/vnd.oci.image.config.v1+json", JSON(t, config)), "layers": descriptors,
	}))
}

// Index makes the layout's index.json of descriptors.
func (l Layout) Index(t testing.TB, manifests ...Object) Layout {
	t.Helper()
	l["oci-layout"] = []byte(`{"imageLayoutVersion":"1.0.0"}`)
	l["index.json"] = JSON(t, Object{"schemaVersion": 2, "manifests": manifests})
	return l
}

// Tagged is the descriptor with a tag.
func Tagged(d Object, tag string) Object {
	d = maps.Clone(d)
	d["annotations"] = Object{"org.opencontainers.image.ref.name": tag}
	return d
}

// New is the layout of one image without a tag.
func New(t testing.TB, config Object, pack func(testing.TB, []byte) []byte, layers ...[]byte) Layout {
	t.Helper()
	l := Layout{}
	return l.Index(t, l.Manifest(t, ConfigOf(config, layers...), pack, layers...))
}

// Legacy is what older versions of docker save write for one image.
func Legacy(t testing.TB, tag string, config Object, layers ...[]byte) Layout {
	t.Helper()
	data := JSON(t, ConfigOf(config, layers...))
	name := strings.TrimPrefix(Digest(data), "sha256:") + ".json"
	l := Layout{name: data}
	var names []string
	for _, layer := range layers {
		path := strings.TrimPrefix(Digest(layer), "sha256:") + "/layer.tar"
		l[path] = layer
		names = append(names, path)
	}
	l["manifest.json"] = JSON(t, []Object{{"Config": name, "RepoTags": []string{tag}, "Layers": names}})
	return l
}

// WriteDir writes the layout as a folder and returns its path.
func (l Layout) WriteDir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	for name, data := range l {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// WriteTar writes the layout as a tar, as docker save does, and returns its
// path.
func (l Layout) WriteTar(t testing.TB) string {
	t.Helper()
	var entries []Entry
	for _, name := range slices.Sorted(maps.Keys(l)) {
		entries = append(entries, File(name, string(l[name])))
	}
	path := filepath.Join(t.TempDir(), "image.tar")
	if err := os.WriteFile(path, Layer(t, entries...), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}
