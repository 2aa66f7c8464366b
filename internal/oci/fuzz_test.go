package oci_test

import (
	"bytes"
	"testing"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/oci"
	"github.com/holdpoint/holdpoint/internal/oci/ocitest"
)

// FuzzOpen changes each document of an image; whatever they say, opening ends
// with an image or an error of a kind.
func FuzzOpen(f *testing.F) {
	layer := ocitest.Layer(f, ocitest.File("a", "1"))
	config := ocitest.JSON(f, ocitest.ConfigOf(object{"User": "web:1", "Env": []string{"A=b"}, "ExposedPorts": object{"80/tcp": object{}}, "Volumes": object{"/v": object{}}}, layer))
	l := ocitest.Layout{}
	blob := l.Blob("application/vnd.oci.image.layer.v1.tar", layer)
	configBlob := l.Blob("application/vnd.oci.image.config.v1+json", config)
	manifest := ocitest.JSON(f, object{"schemaVersion": 2, "config": configBlob, "layers": []object{blob}})
	index := func(d object) []byte { return ocitest.JSON(f, object{"schemaVersion": 2, "manifests": []object{d}}) }
	top := l.Blob("application/vnd.oci.image.manifest.v1+json", manifest)
	f.Add(index(ocitest.Tagged(top, "1")), manifest, config, []byte(nil), "1")
	f.Add(index(l.Blob("application/vnd.oci.image.index.v1+json", index(top))), manifest, config, []byte(nil), "")
	legacy := ocitest.Legacy(f, "a:1", nil, layer)
	f.Add([]byte(nil), []byte(nil), config, legacy["manifest.json"], "a:1")
	f.Add([]byte(nil), []byte(nil), config, []byte(`[{"Config":"../x","Layers":[]},{}]`), "")
	f.Fuzz(func(t *testing.T, index, manifest, config, legacy []byte, name string) {
		l := ocitest.Layout{"layer.tar": layer}
		l.Blob("", layer)
		l.Blob("", manifest)
		l.Blob("", config)
		l.Blob("", index)
		if len(index) > 0 {
			l.Index(t)
			l["index.json"] = index
		}
		if len(legacy) > 0 {
			l["manifest.json"] = legacy
		}
		img, err := oci.Open(t.Context(), l.WriteTar(t), oci.Options{Name: name})
		if err != nil {
			if errdefs.KindOf(err) == errdefs.Internal || bytes.ContainsRune([]byte(err.Error()), '\n') {
				t.Errorf("an error of no kind, or of several lines: %v", err)
			}
			return
		}
		defer img.Close()
		if _, err := img.Merge(t.Context(), t.TempDir(), nil); err != nil && errdefs.KindOf(err) == errdefs.Internal {
			t.Errorf("an error of no kind: %v", err)
		}
	})
}
