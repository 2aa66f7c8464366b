package oci_test

import (
	"archive/tar"
	"context"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/oci"
	"github.com/holdpoint/holdpoint/internal/oci/ocitest"
)

type object = ocitest.Object

// load opens and merges an image and returns the content of /a.
func load(t testing.TB, path string, opt oci.Options) (string, error) {
	t.Helper()
	img, err := oci.Open(t.Context(), path, opt)
	if err != nil {
		return "", err
	}
	defer img.Close()
	files, err := img.Merge(t.Context(), t.TempDir(), nil)
	if err != nil {
		return "", err
	}
	data, err := files.ReadFile("/a", 1<<20)
	return string(data), err
}

func layerOf(t testing.TB, content string) []byte {
	return ocitest.Layer(t, ocitest.File("a", content))
}

func TestSources(t *testing.T) {
	one, two := layerOf(t, "1"), layerOf(t, "2")
	tests := []struct {
		name string
		path string
	}{
		{"layout", ocitest.New(t, nil, nil, one, two).WriteDir(t)},
		{"layout, gzip", ocitest.New(t, nil, ocitest.Gzip, one, two).WriteDir(t)},
		{"layout, zstd", ocitest.New(t, nil, ocitest.Zstd, one, two).WriteDir(t)},
		{"docker save", ocitest.New(t, nil, ocitest.Gzip, one, two).WriteTar(t)},
		{"docker save, older", ocitest.Legacy(t, "a:b", nil, one, two).WriteTar(t)},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got, err := load(t, test.path, oci.Options{}); got != "2" || err != nil {
				t.Errorf("/a is %q, %v", got, err)
			}
		})
	}
}

// TestLinkedLayers: older versions of docker save store a layer once and link
// to it.
func TestLinkedLayers(t *testing.T) {
	one := layerOf(t, "1")
	l := ocitest.Legacy(t, "a:b", nil, one, one)
	var entries []ocitest.Entry
	for name, data := range l {
		if strings.HasSuffix(name, "layer.tar") {
			entries = append(entries, ocitest.File("other/layer.tar", string(data)), ocitest.Link(tar.TypeSymlink, name, "../other/layer.tar"))
			continue
		}
		entries = append(entries, ocitest.File("./"+name, string(data)))
	}
	path := filepath.Join(t.TempDir(), "i.tar")
	if err := os.WriteFile(path, ocitest.Layer(t, entries...), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := load(t, path, oci.Options{}); got != "1" || err != nil {
		t.Errorf("/a is %q, %v", got, err)
	}
}

func TestChoice(t *testing.T) {
	l := ocitest.Layout{}
	manifest := func(content string, p object) object {
		layer := layerOf(t, content)
		config := ocitest.ConfigOf(nil, layer)
		if p != nil {
			maps.Copy(config, p)
		}
		d := l.Manifest(t, config, nil, layer)
		if p != nil {
			d["platform"] = p
		}
		return d
	}
	amd := manifest("amd", object{"os": "linux", "architecture": "amd64"})
	arm := manifest("arm", object{"os": "linux", "architecture": "arm64"})
	attestation := l.Blob("application/vnd.oci.image.manifest.v1+json", []byte("{}"))
	attestation["platform"] = object{"os": "unknown", "architecture": "unknown"}
	index := func(ds ...object) object {
		return l.Blob("application/vnd.oci.image.index.v1+json", ocitest.JSON(t, object{"schemaVersion": 2, "manifests": ds}))
	}
	named := func(d object, full string) object {
		d = maps.Clone(d)
		d["annotations"] = object{"io.containerd.image.name": full, "org.opencontainers.image.ref.name": full[strings.LastIndex(full, ":")+1:]}
		return d
	}
	deep := index(index(index(index(amd))))
	two := []object{named(amd, "docker.io/library/debian:12"), named(manifest("other", nil), "docker.io/me/app:1")}
	tests := []struct {
		name, ref string
		top       []object
		want      string
		kind      errdefs.Kind
	}{
		{"one", "", []object{amd}, "amd", ""},
		{"several platforms", "", []object{index(attestation, arm, amd)}, "amd", ""},
		{"index in an index", "", []object{index(index(arm, amd))}, "amd", ""},
		{"indexes too deep", "", []object{deep}, "indexes are inside", errdefs.Invalid},
		{"another platform", "", []object{index(arm, attestation)}, "no image for linux/amd64", errdefs.Unsupported},
		{"another platform's config", "", []object{arm}, "for \"linux/arm64\"", errdefs.Unsupported},
		{"several and no name", "", two, "choose one with --tag: \"debian:12, me/app:1\"", errdefs.Invalid},
		{"by name", "me/app:1", two, "other", ""},
		{"by short name", "debian:12", two, "amd", ""},
		{"by full name", "docker.io/library/debian:12", two, "amd", ""},
		{"by tag", "12", two, "amd", ""},
		{"no such name", "debian:13", two, "only \"debian:12, me/app:1\"; choose one with --tag", errdefs.NotFound},
		{"one image of two names", "", []object{named(amd, "a:1"), named(amd, "a:2")}, "amd", ""},
		{"one name of two images", "1", []object{named(amd, "docker.io/x/a:1"), named(arm, "docker.io/x/b:1")}, "several images in it; give --tag a longer one", errdefs.Invalid},
		{"none", "", nil, "no image in it", errdefs.Invalid},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			layout := maps.Clone(l)
			got, err := load(t, layout.Index(t, test.top...).WriteDir(t), oci.Options{Name: test.ref})
			if test.kind == "" {
				if got != test.want || err != nil {
					t.Errorf("got %q, %v", got, err)
				}
				return
			}
			wantError(t, err, test.kind, test.want)
		})
	}
}

func wantError(t *testing.T, err error, kind errdefs.Kind, text string) {
	t.Helper()
	if err == nil || errdefs.KindOf(err) != kind || !strings.Contains(err.Error(), text) || strings.ContainsRune(err.Error(), '\n') {
		t.Errorf("got %s: %v; want %s with %q", errdefs.KindOf(err), err, kind, text)
	}
}

func TestLegacyChoice(t *testing.T) {
	l := ocitest.Legacy(t, "a:1", nil, layerOf(t, "1"))
	other := ocitest.Legacy(t, "b:2", nil, layerOf(t, "2"))
	trimmed := func(l ocitest.Layout) string {
		return strings.TrimSuffix(strings.TrimPrefix(string(l["manifest.json"]), "["), "]")
	}
	both := "[" + trimmed(l) + "," + trimmed(other) + "]"
	maps.Copy(l, other)
	l["manifest.json"] = []byte(both)
	path := l.WriteTar(t)
	if got, err := load(t, path, oci.Options{Name: "b:2"}); got != "2" || err != nil {
		t.Errorf("/a is %q, %v", got, err)
	}
	_, err := load(t, path, oci.Options{})
	wantError(t, err, errdefs.Invalid, "choose one with --tag: \"a:1, b:2\"")
	_, err = load(t, path, oci.Options{Name: "c"})
	wantError(t, err, errdefs.NotFound, "only \"a:1, b:2\"")
}

// edit changes the first descriptor of a layer in an image of one.
func edit(t *testing.T, change func(l ocitest.Layout, manifest, layer object)) string {
	t.Helper()
	l := ocitest.Layout{}
	data := ocitest.Gzip(t, layerOf(t, "1"))
	layer := l.Blob("application/vnd.oci.image.layer.v1.tar+gzip", data)
	manifest := object{
		"schemaVersion": 2, "layers": []object{layer},
		"config": l.Blob("application/vnd.oci.image.config.v1+json", ocitest.JSON(t, ocitest.ConfigOf(nil, layerOf(t, "1")))),
	}
	change(l, manifest, layer)
	return l.Index(t, l.Blob("application/vnd.oci.image.manifest.v1+json", ocitest.JSON(t, manifest))).WriteDir(t)
}

// TestSHA512: both digests that the specification registers are checked.
func TestSHA512(t *testing.T) {
	with := func(digits func([]byte) string) string {
		return edit(t, func(l ocitest.Layout, _, layer object) {
			data := l[blobPath(layer)]
			layer["digest"] = "sha512:" + digits(data)
			l[blobPath(layer)] = data
		})
	}
	path := with(func(data []byte) string { sum := sha512.Sum512(data); return hex.EncodeToString(sum[:]) })
	if got, err := load(t, path, oci.Options{}); got != "1" || err != nil {
		t.Errorf("/a is %q, %v", got, err)
	}
	_, err := load(t, with(func([]byte) string { return strings.Repeat("0", 128) }), oci.Options{})
	wantError(t, err, errdefs.Invalid, "does not have the digest")
}

func blobPath(d object) string {
	return "blobs/" + strings.Replace(d["digest"].(string), ":", "/", 1)
}

func TestHostileImages(t *testing.T) {
	config := func(t *testing.T, l ocitest.Layout, manifest, config object) {
		manifest["config"] = l.Blob("application/vnd.oci.image.config.v1+json", ocitest.JSON(t, config))
	}
	tests := []struct {
		name   string
		change func(l ocitest.Layout, manifest, layer object)
		kind   errdefs.Kind
		want   string
	}{
		{"blob changed", func(l ocitest.Layout, _, layer object) {
			data := slices.Clone(l[blobPath(layer)])
			data[4]++ // gzip's time
			l[blobPath(layer)] = data
		}, errdefs.Invalid, "does not have the digest"},
		{"blob cut off", func(l ocitest.Layout, _, layer object) {
			l[blobPath(layer)] = l[blobPath(layer)][:50]
		}, errdefs.Invalid, "cut off"},
		{"blob longer", func(l ocitest.Layout, _, layer object) {
			l[blobPath(layer)] = append(slices.Clone(l[blobPath(layer)]), 0)
		}, errdefs.Invalid, "instead of"},
		{"stream cut off", func(l ocitest.Layout, m, layer object) {
			maps.Copy(layer, l.Blob("application/vnd.oci.image.layer.v1.tar+gzip", l[blobPath(layer)][:50]))
		}, errdefs.Invalid, "cut off"},
		{"tar cut off", func(l ocitest.Layout, m, layer object) {
			tar := layerOf(t, strings.Repeat("x", 2000))[:700]
			maps.Copy(layer, l.Blob("application/vnd.oci.image.layer.v1.tar", tar))
			config(t, l, m, ocitest.ConfigOf(nil, tar))
		}, errdefs.Invalid, "cut off"},
		{"no tar", func(l ocitest.Layout, m, layer object) {
			data := []byte(strings.Repeat("x", 1024))
			maps.Copy(layer, l.Blob("application/vnd.oci.image.layer.v1.tar", data))
			config(t, l, m, ocitest.ConfigOf(nil, data))
		}, errdefs.Invalid, "no tar"},
		{"no gzip", func(l ocitest.Layout, m, layer object) {
			maps.Copy(layer, l.Blob("application/vnd.oci.image.layer.v1.tar+gzip", []byte("\x1f\x8bxxxxxxxxxxxx")))
		}, errdefs.Invalid, "no tar, or damaged"},
		{"no zstd", func(l ocitest.Layout, m, layer object) {
			maps.Copy(layer, l.Blob("application/vnd.oci.image.layer.v1.tar+zstd", []byte("\x28\xb5\x2f\xfdxxxxxxxxxxxx")))
		}, errdefs.Invalid, "no tar, or damaged"},
		{"xz", func(l ocitest.Layout, m, layer object) {
			maps.Copy(layer, l.Blob("application/vnd.oci.image.layer.v1.tar", []byte("\xfd7zXZ\x00xxxxxx")))
		}, errdefs.Unsupported, "neither with gzip nor with zstd"},
		{"another layer's diff id", func(l ocitest.Layout, m, _ object) {
			config(t, l, m, ocitest.ConfigOf(nil, layerOf(t, "2")))
		}, errdefs.Invalid, "that the config gives"},
		{"more diff ids", func(l ocitest.Layout, m, _ object) {
			config(t, l, m, ocitest.ConfigOf(nil, layerOf(t, "1"), layerOf(t, "1")))
		}, errdefs.Invalid, "names 1 layers and the config 2"},
		{"too many layers", func(_ ocitest.Layout, m, layer object) {
			m["layers"] = slices.Repeat([]object{layer}, 257)
		}, errdefs.Invalid, "257 layers"},
		{"blob missing", func(l ocitest.Layout, _, layer object) { delete(l, blobPath(layer)) }, errdefs.NotFound, "has no file"},
		{"config missing", func(l ocitest.Layout, m, _ object) { delete(l, blobPath(m["config"].(object))) }, errdefs.NotFound, "has no file"},
		{"config changed", func(l ocitest.Layout, m, _ object) {
			p := blobPath(m["config"].(object))
			l[p] = append([]byte(" "), l[p][1:]...)
		}, errdefs.Invalid, "does not have the digest"},
		{"traversal", func(_ ocitest.Layout, _, layer object) { layer["digest"] = "sha256:../../../../etc/passwd" }, errdefs.Invalid, "malformed"},
		{"traversal by algorithm", func(_ ocitest.Layout, _, layer object) { layer["digest"] = "../../etc:passwd" }, errdefs.Unsupported, "algorithm"},
		{"unknown algorithm", func(_ ocitest.Layout, _, layer object) { layer["digest"] = "md5:" + strings.Repeat("0", 32) }, errdefs.Unsupported, "neither sha256 nor sha512"},
		{"short digest", func(_ ocitest.Layout, _, layer object) { layer["digest"] = "sha256:00" }, errdefs.Invalid, "malformed"},
		{"digest of another algorithm", func(_ ocitest.Layout, _, layer object) { layer["digest"] = "sha512:" + strings.Repeat("0", 64) }, errdefs.Invalid, "malformed"},
		{"no digest", func(_ ocitest.Layout, _, layer object) { layer["digest"] = "" }, errdefs.Invalid, "malformed"},
		{"upper case", func(_ ocitest.Layout, _, layer object) { layer["digest"] = strings.ToUpper(layer["digest"].(string)) }, errdefs.Unsupported, "algorithm"},
		{"negative size", func(_ ocitest.Layout, _, layer object) { layer["size"] = -1 }, errdefs.Invalid, "negative"},
		{"huge size", func(_ ocitest.Layout, _, layer object) { layer["size"] = int64(1) << 62 }, errdefs.Invalid, "instead of"},
		{"foreign", func(_ ocitest.Layout, _, layer object) {
			layer["mediaType"] = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
		}, errdefs.Unsupported, "fetched from elsewhere"},
		{"not distributable", func(_ ocitest.Layout, _, layer object) {
			layer["mediaType"] = "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
		}, errdefs.Unsupported, "fetched from elsewhere"},
		{"urls", func(_ ocitest.Layout, _, layer object) { layer["urls"] = []string{"http://127.0.0.1/"} }, errdefs.Unsupported, "fetched from elsewhere"},
		{"no layer", func(_ ocitest.Layout, _, layer object) { layer["mediaType"] = "application/vnd.wasm" }, errdefs.Unsupported, "unknown type"},
		{"schema", func(_ ocitest.Layout, m, _ object) { m["schemaVersion"] = 1 }, errdefs.Unsupported, "schema version 1"},
		{"windows", func(l ocitest.Layout, m, _ object) {
			c := ocitest.ConfigOf(nil, layerOf(t, "1"))
			c["os"] = "windows"
			config(t, l, m, c)
		}, errdefs.Unsupported, "for \"windows/amd64\""},
		{"huge config", func(l ocitest.Layout, m, _ object) {
			config(t, l, m, ocitest.ConfigOf(object{"User": strings.Repeat("x", 5<<20)}, layerOf(t, "1")))
		}, errdefs.Invalid, "more than the"},
		{"config no JSON", func(l ocitest.Layout, m, _ object) {
			m["config"] = l.Blob("application/vnd.oci.image.config.v1+json", []byte("[1"))
		}, errdefs.Invalid, "no document"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := load(t, edit(t, test.change), oci.Options{})
			wantError(t, err, test.kind, test.want)
		})
	}
}

func TestHostileSources(t *testing.T) {
	write := func(name string, data []byte) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good, err := os.ReadFile(ocitest.New(t, nil, nil, layerOf(t, strings.Repeat("x", 100_000))).WriteTar(t))
	if err != nil {
		t.Fatal(err)
	}
	many := slices.Repeat([]ocitest.Entry{ocitest.File("f", "")}, 20_001)
	loop := ocitest.Layer(t, ocitest.Link(tar.TypeSymlink, "oci-layout", "oci-layout"))
	out := t.TempDir()
	if err := os.Symlink("/etc/hostname", filepath.Join(out, "oci-layout")); err != nil {
		t.Fatal(err)
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	inside := t.TempDir()
	for _, p := range []string{pipe, filepath.Join(inside, "oci-layout")} {
		if err := syscall.Mkfifo(p, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	legacy := func(config, layer string) string {
		l := ocitest.Legacy(t, "a:1", nil, layerOf(t, "1"))
		l["manifest.json"] = ocitest.JSON(t, []object{{"Config": config, "Layers": []string{layer}}})
		return l.WriteTar(t)
	}
	changed := ocitest.Legacy(t, "a:1", nil, layerOf(t, "1"))
	for name := range changed {
		if strings.HasSuffix(name, ".tar") {
			changed[name] = layerOf(t, "2")
		}
	}
	version := ocitest.New(t, nil, nil, layerOf(t, "1"))
	version["oci-layout"] = []byte(`{"imageLayoutVersion":"2.0.0"}`)
	tests := []struct {
		name, path string
		kind       errdefs.Kind
		want       string
	}{
		{"another layout", version.WriteDir(t), errdefs.Unsupported, "version"},
		{"name too long", write("i", ocitest.Layer(t, ocitest.File(strings.Repeat("n", 5000), ""))), errdefs.Invalid, "too long"},
		{"missing", "/nonexistent/image.tar", errdefs.NotFound, "no such file"},
		{"empty folder", t.TempDir(), errdefs.Invalid, "neither an oci-layout nor a manifest.json"},
		{"no tar", write("i", []byte(strings.Repeat("text ", 1000))), errdefs.Invalid, "no tar"},
		{"cut off", write("i", good[:len(good)/2]), errdefs.Invalid, "cut off"},
		{"gzip", write("i", ocitest.Gzip(t, good)), errdefs.Unsupported, "gunzip"},
		{"zstd", write("i", ocitest.Zstd(t, good)), errdefs.Unsupported, "zstd -d"},
		{"too many files", write("i", ocitest.Layer(t, many...)), errdefs.Invalid, "more than 20000 files"},
		{"link to itself", write("i", loop), errdefs.Invalid, "link to itself"},
		{"link out of the folder", out, errdefs.Invalid, "escapes"},
		{"pipe", pipe, errdefs.Invalid, "neither a folder nor a file"},
		{"pipe in the folder", inside, errdefs.Invalid, "no regular file"},
		{"older: config not by digest", legacy("repositories", "x"), errdefs.Invalid, "not called by its digest"},
		{"older: config elsewhere", legacy("../../"+strings.Repeat("0", 64)+".json", "x"), errdefs.NotFound, "has no file"},
		{"older: names of several lines", legacy("a\nb/"+strings.Repeat("0", 64)+".json", "x"), errdefs.NotFound, "has no file"},
		{"older: layer changed", changed.WriteTar(t), errdefs.Invalid, "that the config gives"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := load(t, test.path, oci.Options{})
			wantError(t, err, test.kind, test.want)
		})
	}
}

func TestLimits(t *testing.T) {
	zeros := ocitest.Layer(t, ocitest.File("a", strings.Repeat("\x00", 3<<20)))
	path := ocitest.New(t, nil, ocitest.Gzip, zeros, zeros).WriteDir(t)
	_, err := load(t, path, oci.Options{MaxBytes: 7 << 20})
	wantError(t, err, errdefs.Invalid, "more than 1048576") // what ReadFile was told
	_, err = load(t, path, oci.Options{MaxBytes: 5 << 20})
	wantError(t, err, errdefs.Invalid, "larger than the 5242880 bytes")
}

// TestBombs: files of holes and streams of zeros are refused by their size
// before it has cost anything.
func TestBombs(t *testing.T) {
	path := ocitest.New(t, nil, ocitest.Gzip, sparseLayer(t, 1<<40)).WriteDir(t)
	_, err := load(t, path, oci.Options{})
	wantError(t, err, errdefs.Invalid, "larger than")
	path = ocitest.New(t, nil, ocitest.Gzip, sparseLayer(t, 2<<30)).WriteDir(t)
	_, err = load(t, path, oci.Options{})
	wantError(t, err, errdefs.Invalid, "200 times its size")
}

// sparseLayer is a layer of one file of that size that is all hole, in the old
// GNU format, which archive/tar reads and does not write.
func sparseLayer(t *testing.T, size int64) []byte {
	t.Helper()
	data := ocitest.Layer(t, ocitest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "a", Format: tar.FormatGNU}})
	h := data[:512]
	h[156] = tar.TypeGNUSparse
	// No pieces; the real size in base 256.
	copy(h[386:], "00000000000\x0000000000000\x00")
	h[483] = 0x80
	for i := range 8 {
		h[494-i] = byte(size >> (8 * i))
	}
	sum := 0
	copy(h[148:156], "        ")
	for _, b := range h {
		sum += int(b)
	}
	octal := []byte("000000\x00 ")
	for i := 5; i >= 0; i-- {
		octal[i] = byte('0' + sum&7)
		sum >>= 3
	}
	copy(h[148:], octal)
	return data
}

func TestSparseFile(t *testing.T) {
	got, err := load(t, ocitest.New(t, nil, nil, sparseLayer(t, 600_000)).WriteDir(t), oci.Options{})
	if err != nil || got != strings.Repeat("\x00", 600_000) {
		t.Errorf("got %d bytes, %v", len(got), err)
	}
}

func TestConfig(t *testing.T) {
	layer := layerOf(t, "1")
	path := ocitest.New(t, object{
		"User": "web:staff", "Env": []string{"PATH=/bin", "EMPTY=", "A=b=c"}, "WorkingDir": "/srv/../app/",
		"Entrypoint": []string{"/entry", "-x"}, "Cmd": []string{"serve"},
		"ExposedPorts": object{"8080": object{}, "53/udp": object{}, "53/tcp": object{}}, "Volumes": object{"/var/lib/db/": object{}, "/a": object{}},
	}, nil, layer).WriteDir(t)
	img, err := oci.Open(t.Context(), path, oci.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	want := oci.Config{
		User: "web:staff", Env: []string{"PATH=/bin", "EMPTY=", "A=b=c"}, WorkingDir: "/app",
		Entrypoint: []string{"/entry", "-x"}, Cmd: []string{"serve"},
		ExposedPorts: []oci.Port{{Number: 53, Protocol: "tcp"}, {Number: 53, Protocol: "udp"}, {Number: 8080, Protocol: "tcp"}},
		Volumes:      []string{"/a", "/var/lib/db"},
	}
	if diff := cmp.Diff(want, img.Config); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"/entry", "-x", "serve"}, img.Config.Command()); diff != "" {
		t.Error(diff)
	}
	for _, bad := range []object{
		{"Env": []string{"NOVALUE"}},
		{"Env": []string{"=x"}},
		{"Env": []string{"A=\x00"}},
		{"Env": slices.Repeat([]string{"A=b"}, 10_001)},
		{"ExposedPorts": object{"0": object{}}},
		{"ExposedPorts": object{"65536": object{}}},
		{"ExposedPorts": object{"80/icmp": object{}}},
		{"ExposedPorts": object{"x": object{}}},
		{"Volumes": object{"rel": object{}}},
		{"User": "a\x00"},
		{"Cmd": "text"},
	} {
		_, err := load(t, ocitest.New(t, bad, nil, layer).WriteDir(t), oci.Options{})
		if !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%v: got %v", bad, err)
		}
	}
}

func TestCancelAndProgress(t *testing.T) {
	random := make([]byte, 1<<20)
	for i := range random {
		random[i] = byte(i * i >> 7)
	}
	path := ocitest.New(t, nil, ocitest.Gzip, layerOf(t, string(random)), layerOf(t, "2")).WriteTar(t)
	ctx, cancel := context.WithCancel(t.Context())
	img, err := oci.Open(ctx, path, oci.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	var reported []int64
	if _, err := img.Merge(ctx, t.TempDir(), func(done int64) { reported = append(reported, done) }); err != nil {
		t.Fatal(err)
	}
	if len(reported) == 0 || !slices.IsSorted(reported) || reported[len(reported)-1] != img.Bytes {
		t.Errorf("reported %v of %d", reported, img.Bytes)
	}
	_, err = img.Merge(ctx, t.TempDir(), func(int64) { cancel() })
	if !errors.Is(err, context.Canceled) || errdefs.KindOf(err) != errdefs.Interrupted {
		t.Errorf("canceled: %v", err)
	}
	if _, err := oci.Open(ctx, path, oci.Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}
