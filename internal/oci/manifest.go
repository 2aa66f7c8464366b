package oci

import (
	"encoding/json"
	"errors"
	"path"
	"slices"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// What the OCI image specification and Docker call the documents and layers.
const (
	ociIndex       = "application/vnd.oci.image.index.v1+json"
	ociManifest    = "application/vnd.oci.image.manifest.v1+json"
	dockerIndex    = "application/vnd.docker.distribution.manifest.list.v2+json"
	dockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	ociLayer       = "application/vnd.oci.image.layer.v1.tar"
	ociForeign     = "application/vnd.oci.image.layer.nondistributable.v1.tar"
	dockerLayer    = "application/vnd.docker.image.rootfs.diff.tar"
	dockerForeign  = "application/vnd.docker.image.rootfs.foreign.diff.tar"

	refName       = "org.opencontainers.image.ref.name"
	containerdRef = "io.containerd.image.name"
)

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	URLs        []string          `json:"urls"`
	Annotations map[string]string `json:"annotations"`
	Platform    *platform         `json:"platform"`
}

type platform struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
}

func (p platform) isOurs() bool { return p.OS == "linux" && p.Architecture == "amd64" }

func (d descriptor) isIndex() bool { return d.MediaType == ociIndex || d.MediaType == dockerIndex }

func (d descriptor) isManifest() bool {
	return d.MediaType == ociManifest || d.MediaType == dockerManifest
}

// names are what the image may be called by, the shortest first.
func (d descriptor) names() []string {
	var names []string
	if full := d.Annotations[containerdRef]; full != "" {
		short := strings.TrimPrefix(strings.TrimPrefix(full, "docker.io/"), "library/")
		names = append(names, short, full)
	}
	if ref := d.Annotations[refName]; ref != "" && !slices.Contains(names, ref) {
		names = append(names, ref)
	}
	return names
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	Manifests     []descriptor `json:"manifests"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

// parse reads a document of which more than what v asks for may be there.
func parse(name string, data []byte, v any) error {
	if err := json.Unmarshal(data, v); err != nil {
		return errdefs.New(errdefs.Invalid, "%s is no document of an image: %w", name, err)
	}
	return nil
}

func parseIndex(name string, data []byte) (index, error) {
	var x index
	if err := parse(name, data, &x); err != nil {
		return index{}, err
	}
	switch {
	case x.SchemaVersion != 2:
		return index{}, errdefs.New(errdefs.Unsupported, "%s has the schema version %d and not 2", name, x.SchemaVersion)
	case len(x.Manifests) > maxManifests:
		return index{}, errdefs.New(errdefs.Invalid, "%s names more than %d manifests", name, maxManifests)
	}
	return x, nil
}

// checkLayout reads the oci-layout file, which is there for its version.
func checkLayout(data []byte) error {
	var layout struct {
		Version string `json:"imageLayoutVersion"`
	}
	if err := parse("oci-layout", data, &layout); err != nil {
		return err
	}
	if !strings.HasPrefix(layout.Version, "1.") {
		return errdefs.New(errdefs.Unsupported, "its layout has the version %.100q and not 1", layout.Version)
	}
	return nil
}

// blob reads a document by its descriptor.
func (img *Image) blob(d descriptor) (name string, data []byte, err error) {
	dig, err := parseDigest(d.Digest)
	if err != nil {
		return "", nil, err
	}
	if d.Size < 0 {
		return "", nil, errdefs.New(errdefs.Invalid, "%s has a negative size", dig)
	}
	data, err = readDocument(img.src, dig.path(), dig, d.Size)
	return dig.path(), data, err
}

// readLayout reads an OCI layout down to its layers.
func (img *Image) readLayout(name string) error {
	data, err := readDocument(img.src, "index.json", digest{}, -1)
	if err != nil {
		return err
	}
	top, err := parseIndex("index.json", data)
	if err != nil {
		return err
	}
	chosen, err := choose(top.Manifests, name)
	if err != nil {
		return err
	}
	if chosen, err = img.forPlatform(chosen); err != nil {
		return err
	}
	path, data, err := img.blob(chosen)
	if err != nil {
		return err
	}
	var m manifest
	if err := parse(path, data, &m); err != nil {
		return err
	}
	if m.SchemaVersion != 2 {
		return errdefs.New(errdefs.Unsupported, "%s has the schema version %d and not 2", path, m.SchemaVersion)
	}
	return img.readManifest(m)
}

// choose finds the image of that name; without one there may be only one.
func choose(all []descriptor, name string) (descriptor, error) {
	var names []string
	var found []descriptor
	for _, d := range all {
		if !d.isIndex() && !d.isManifest() {
			continue
		}
		own := d.names()
		if name != "" && !slices.Contains(own, name) {
			names = append(names, firstOf(own, d.Digest))
			continue
		}
		names = append(names, firstOf(own, d.Digest))
		if !slices.ContainsFunc(found, func(f descriptor) bool { return f.Digest == d.Digest }) {
			found = append(found, d)
		}
	}
	return only(found, names, name)
}

func firstOf(names []string, otherwise string) string {
	if len(names) > 0 {
		return names[0]
	}
	return otherwise
}

// only returns the one that was found, or says which there are.
func only[T any](found []T, names []string, name string) (T, error) {
	var none T
	slices.Sort(names)
	names = slices.Compact(names)
	list := strings.Join(names[:min(len(names), 20)], ", ")
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(names) == 0:
		return none, errdefs.New(errdefs.Invalid, "there is no image in it")
	case len(found) == 0:
		return none, errdefs.New(errdefs.NotFound, "there is no image %.300q in it, only %.3000q; choose one with --tag", name, list)
	case name != "":
		return none, errdefs.New(errdefs.Invalid, "%.300q is the name of several images in it; give --tag a longer one of %.3000q", name, list)
	}
	return none, errdefs.New(errdefs.Invalid, "there are several images in it; choose one with --tag: %.3000q", list)
}

// forPlatform follows indexes down to the manifest for linux/amd64.
func (img *Image) forPlatform(d descriptor) (descriptor, error) {
	for range maxIndexes {
		if d.isManifest() {
			return d, nil
		}
		name, data, err := img.blob(d)
		if err != nil {
			return descriptor{}, err
		}
		x, err := parseIndex(name, data)
		if err != nil {
			return descriptor{}, err
		}
		ours := func(d descriptor) bool {
			return (d.isIndex() || d.isManifest()) && d.Platform != nil && d.Platform.isOurs()
		}
		anyOfUnknown := func(d descriptor) bool { return (d.isIndex() || d.isManifest()) && d.Platform == nil }
		i := slices.IndexFunc(x.Manifests, ours)
		if i < 0 {
			i = slices.IndexFunc(x.Manifests, anyOfUnknown)
		}
		if i < 0 {
			return descriptor{}, errdefs.New(errdefs.Unsupported, "there is no image for linux/amd64 in it; save it with --platform linux/amd64")
		}
		d = x.Manifests[i]
	}
	if d.isManifest() {
		return d, nil
	}
	return descriptor{}, errdefs.New(errdefs.Invalid, "more than %d indexes are inside one another", maxIndexes)
}

func (img *Image) readManifest(m manifest) error {
	_, data, err := img.blob(m.Config)
	if err != nil {
		return err
	}
	diffIDs, err := img.readConfig(data, len(m.Layers))
	if err != nil {
		return err
	}
	for i, d := range m.Layers {
		dig, err := parseDigest(d.Digest)
		if err != nil {
			return err
		}
		if err := checkLayer(d); err != nil {
			return err
		}
		if err := img.addLayer(layer{name: dig.path(), digest: dig, size: d.Size, diffID: diffIDs[i]}); err != nil {
			return err
		}
	}
	return nil
}

// checkLayer refuses what is no layer, or is not in the source by design.
func checkLayer(d descriptor) error {
	kind, _, _ := strings.Cut(d.MediaType, "+")
	kind = strings.TrimSuffix(kind, ".gzip")
	switch {
	case kind == ociForeign || kind == dockerForeign || len(d.URLs) > 0:
		return errdefs.New(errdefs.Unsupported, "layer %s is not in the image: it is to be fetched from elsewhere, which holdpoint does not do", d.Digest)
	case kind != ociLayer && kind != dockerLayer:
		return errdefs.New(errdefs.Unsupported, "layer %s is of the unknown type %.100q", d.Digest, d.MediaType)
	case d.Size < 0:
		return errdefs.New(errdefs.Invalid, "layer %s has a negative size", d.Digest)
	}
	return nil
}

// addLayer finds out that the blob is there in its full length.
func (img *Image) addLayer(l layer) error {
	f, size, err := img.src.open(l.name)
	if err != nil {
		return err
	}
	f.Close()
	if !l.digest.isZero() && size != l.size {
		return errdefs.New(errdefs.Invalid, "layer %.300q has %d bytes instead of %d; it is damaged or cut off", l.name, size, l.size)
	}
	l.size = size
	img.Bytes += size
	img.layers = append(img.layers, l)
	return nil
}

var errNoLegacy = errors.New("no manifest.json")

// saved is an image in the manifest.json of docker save.
type saved struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// readLegacy reads the older form of docker save, in which only the config's
// digest (by its name) and those of the unpacked layers are known.
func (img *Image) readLegacy(name string) error {
	data, err := readDocument(img.src, "manifest.json", digest{}, -1)
	if errdefs.Is(err, errdefs.NotFound) {
		return errNoLegacy
	}
	if err != nil {
		return err
	}
	var all []saved
	if err := parse("manifest.json", data, &all); err != nil {
		return err
	}
	var names []string
	var found []saved
	for _, s := range all {
		names = append(names, firstOf(s.RepoTags, s.Config))
		if name == "" || slices.Contains(s.RepoTags, name) {
			found = append(found, s)
		}
	}
	one, err := only(found, names, name)
	if err != nil {
		return err
	}
	want, err := parseDigest("sha256:" + strings.TrimSuffix(path.Base(one.Config), ".json"))
	if err != nil {
		return errdefs.New(errdefs.Invalid, "manifest.json: the config %.300q is not called by its digest", one.Config)
	}
	if data, err = readDocument(img.src, path.Clean(one.Config), want, -1); err != nil {
		return err
	}
	diffIDs, err := img.readConfig(data, len(one.Layers))
	if err != nil {
		return err
	}
	for i, l := range one.Layers {
		if err := img.addLayer(layer{name: path.Clean(l), diffID: diffIDs[i]}); err != nil {
			return err
		}
	}
	return nil
}
