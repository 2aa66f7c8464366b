package script_test

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakedisk"
	"github.com/holdpoint/holdpoint/test/session"
)

// imageBytes is the size of a fake image's root disk.
const imageBytes = 256 << 20

// cmdImage puts an image into the home, as a build would; no daemon runs yet.
// It is made from the description of the formats alone.
func cmdImage(ts *testscript.TestScript, neg bool, args []string) {
	session.Usage(ts, neg, args, 1, "image NAME [ARCH]")
	arch := image.Architecture
	if len(args) > 1 {
		arch = args[1]
	}
	ts.Check(putImage(session.Of(ts), args[0], arch))
}

func putImage(s *session.Session, name, arch string) error {
	h, err := home.Open(s.Home)
	if err != nil {
		return err
	}
	if err := h.Create(); err != nil {
		return err
	}
	m, err := writeImage(h.Images(), name, arch, defaults.Defaults{})
	if err != nil {
		return err
	}
	return s.PutImage(catalog.Image{
		BuildID: m.BuildID, Name: name, Architecture: arch, KernelVersion: m.KernelVersion,
		DiskBytes: m.DiskBytes, StoredBytes: 4096, Packages: m.Packages, CreatedAt: m.CreatedAt,
	})
}

// writeImage puts an image into the folder of images.
func writeImage(images, name, arch string, d defaults.Defaults) (image.Manifest, error) {
	m := image.Manifest{
		Version: 1, Architecture: arch, Recipe: "debian", Packages: []string{"nginx"},
		KernelVersion: "6.1.0-fake", CreatedAt: time.Now().UTC(), DiskBytes: imageBytes, Defaults: d,
	}
	if !d.IsZero() {
		m.Version = 2
	}
	tmp, err := os.MkdirTemp(filepath.Dir(images), "image")
	if err != nil {
		return m, err
	}
	defer os.RemoveAll(tmp)
	tree := filepath.Join(tmp, "tree")
	for _, dir := range []string{"etc", "tmp", "run"} {
		if err := os.MkdirAll(filepath.Join(tree, dir), 0o755); err != nil {
			return m, err
		}
	}
	if err := os.WriteFile(filepath.Join(tree, "etc/issue"), []byte("image "+name+"\n"), 0o644); err != nil {
		return m, err
	}
	made := filepath.Join(tmp, "image")
	if err := os.Mkdir(made, 0o700); err != nil {
		return m, err
	}
	for file, asset := range map[string]*image.Asset{"kernel": &m.Kernel, "initramfs": &m.Initramfs} {
		data := []byte("the " + file + " of " + name)
		sum := sha256.Sum256(data)
		*asset = image.Asset{Size: int64(len(data)), SHA256: hex.EncodeToString(sum[:])}
		if err := os.WriteFile(filepath.Join(made, file), data, 0o400); err != nil {
			return m, err
		}
	}
	root := filepath.Join(made, "root.img")
	if err := fakedisk.WriteImage(root, tree, imageBytes); err != nil {
		return m, err
	}
	if m.Root.SHA256, err = diskDigest(root); err != nil {
		return m, err
	}
	m.Root.Size = imageBytes
	ids := sha256.New()
	fmt.Fprintf(ids, "holdpoint image %d\narchitecture %s\n", m.Version, arch)
	for _, a := range []struct {
		noun string
		image.Asset
	}{{"kernel", m.Kernel}, {"initramfs", m.Initramfs}, {"root", m.Root}} {
		fmt.Fprintf(ids, "%s %d %s\n", a.noun, a.Size, a.SHA256)
	}
	if !d.IsZero() {
		said, err := json.Marshal(d)
		if err != nil {
			return m, err
		}
		fmt.Fprintf(ids, "defaults %x\n", sha256.Sum256(said))
	}
	m.BuildID = hex.EncodeToString(ids.Sum(nil)[:16])
	data, err := json.Marshal(m)
	if err != nil {
		return m, err
	}
	if err := os.WriteFile(filepath.Join(made, "manifest.json"), data, 0o400); err != nil {
		return m, err
	}
	return m, os.Rename(made, filepath.Join(images, m.BuildID))
}

// diskDigest makes the file imageBytes long and digests it; all it holds is in
// its first block of 64 KiB.
func diskDigest(path string) (string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	const block = 64 << 10
	if len(data) > block {
		return "", fmt.Errorf("the fake image's disk has %d bytes", len(data))
	}
	if err := os.Truncate(path, imageBytes); err != nil {
		return "", err
	}
	if err := os.Chmod(path, 0o400); err != nil {
		return "", err
	}
	h := sha256.New()
	h.Write(binary.BigEndian.AppendUint64(nil, imageBytes))
	h.Write(binary.BigEndian.AppendUint64(nil, 0))
	h.Write(append(data, make([]byte, block-len(data))...))
	return hex.EncodeToString(h.Sum(nil)), nil
}

// cmdSpoil changes a byte of an image's kernel.
func cmdSpoil(ts *testscript.TestScript, neg bool, args []string) {
	session.Usage(ts, neg, args, 1, "spoil NAME")
	ts.Check(ts.Exec("holdpoint", "image", "inspect", args[0], "--json"))
	id, ok := session.LookUp(ts, "image.build_id")
	if !ok {
		ts.Fatalf("no build id")
	}
	kernel := filepath.Join(session.HomeOf(ts).Images(), id, "kernel")
	data, err := os.ReadFile(kernel)
	ts.Check(err)
	data[0] ^= 1
	ts.Check(os.Chmod(kernel, 0o600))
	ts.Check(os.WriteFile(kernel, data, 0o600))
}
