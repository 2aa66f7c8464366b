package image

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"syscall"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
)

// The versions of the manifest: the second one has defaults, and is written where
// there are any.
const (
	plainVersion    = 1
	defaultsVersion = 2
)

// maxManifest is the longest manifest that is read, in bytes; a real one is
// about 1 KiB.
const maxManifest = 64 << 10

// Manifest is the content of an image's manifest.json.
type Manifest struct {
	Version int `json:"version"`
	// BuildID is the image's identity: 32 lower-case hexadecimal digits, see
	// buildID.
	BuildID string `json:"build_id"`
	// Architecture is as uname -m calls it.
	Architecture string `json:"architecture"`
	// Recipe is how it was built: "debian", "debian-systemd", "import".
	Recipe string `json:"recipe"`
	// Init is who process 1 is in machines that do not say: "system" for the disk's
	// own init, empty for the guest agent.
	Init string `json:"init,omitempty"`
	// Packages are those asked for, sorted; what they depend on is not listed.
	Packages []string `json:"packages"`
	// ScriptSHA256 is the digest of the user's script; empty without one.
	ScriptSHA256 string `json:"script_sha256,omitempty"`
	// KernelVersion is as uname -r says it in the guest.
	KernelVersion string    `json:"kernel_version"`
	CreatedAt     time.Time `json:"created_at"`
	// DiskBytes is the size of the root disk that a guest sees.
	DiskBytes int64 `json:"disk_bytes"`
	Kernel    Asset `json:"kernel"`
	Initramfs Asset `json:"initramfs"`
	// Root's digest is the disk digest, see sparse.Digest.
	Root Asset `json:"root"`
	// Defaults are for the programs of the image's machines.
	Defaults defaults.Defaults `json:"defaults,omitzero"`
}

// Asset is one file of an image.
type Asset struct {
	// Size in bytes, holes included.
	Size int64 `json:"size"`
	// SHA256 is a digest, 64 lower-case hexadecimal digits.
	SHA256 string `json:"sha256"`
}

var (
	buildIDPattern = regexp.MustCompile(`^[0-9a-f]{32}$`)
	digestPattern  = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// buildID computes the identity of an image: the first 32 hexadecimal digits
// of the sha256 of these lines, each ended by a line feed:
//
//	holdpoint image <version>
//	architecture <architecture>
//	kernel <size> <sha256>
//	initramfs <size> <sha256>
//	root <size> <disk digest>
//	defaults <sha256>
//
// Sizes are decimal; the last line is there in version 2. It says what a machine
// boots from and runs with, not how that was made: the other fields of the
// manifest are not in it.
func (m Manifest) buildID() string {
	h := sha256.New()
	fmt.Fprintf(h, "holdpoint image %d\narchitecture %s\n", m.Version, m.Architecture)
	for _, a := range m.assets() {
		fmt.Fprintf(h, "%s %d %s\n", a.noun, a.Size, a.SHA256)
	}
	if m.Version >= defaultsVersion {
		fmt.Fprintf(h, "defaults %s\n", m.Defaults.Digest())
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// namedAsset is an asset with what it is called in the build id and on disk.
type namedAsset struct {
	noun, file string
	Asset
}

func (m Manifest) assets() []namedAsset {
	return []namedAsset{
		{"kernel", kernelFile, m.Kernel},
		{"initramfs", initramfsFile, m.Initramfs},
		{"root", rootFile, m.Root},
	}
}

// parseManifest reads a manifest. Unknown versions are INCOMPATIBLE; unknown
// fields, and a build id that is not that of the digests, are INVALID.
func parseManifest(data []byte) (Manifest, error) {
	if len(data) > maxManifest {
		return Manifest{}, errdefs.New(errdefs.Invalid, "manifest: it is longer than %d bytes", maxManifest)
	}
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return Manifest{}, errdefs.New(errdefs.Invalid, "manifest: %w; remove the image and build it again", err)
	}
	if head.Version < plainVersion || head.Version > defaultsVersion {
		return Manifest{}, errdefs.New(errdefs.Incompatible, "manifest: version %d is not known to this holdpoint, which knows %d; upgrade holdpoint", head.Version, defaultsVersion)
	}
	var m Manifest
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&m); err != nil {
		return Manifest{}, errdefs.New(errdefs.Invalid, "manifest: %w; remove the image and build it again", err)
	}
	if err := m.check(); err != nil {
		return Manifest{}, errdefs.New(errdefs.Invalid, "manifest: %w; remove the image and build it again", err)
	}
	return m, nil
}

func (m Manifest) check() error {
	for _, a := range m.assets() {
		if a.Size <= 0 || !digestPattern.MatchString(a.SHA256) {
			return fmt.Errorf("the %s has no size or digest", a.noun)
		}
	}
	switch {
	case m.BuildID != m.buildID():
		return errors.New("the build id is not that of its digests")
	case m.DiskBytes != m.Root.Size:
		return errors.New("the disk's two sizes differ")
	case len(m.Packages) > recipe.MaxPackages:
		return fmt.Errorf("it names more than %d packages", recipe.MaxPackages)
	case m.Version == plainVersion && !m.Defaults.IsZero():
		return errors.New("its version has no defaults")
	case m.Init != "" && m.Init != machine.InitSystem:
		return fmt.Errorf("it names an unknown init, %q", m.Init)
	case m.ScriptSHA256 != "" && !digestPattern.MatchString(m.ScriptSHA256):
		return errors.New("the script's digest is none")
	}
	return m.Defaults.Check()
}

func (m Manifest) encode() ([]byte, error) {
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	return append(data, '\n'), nil
}

// readSmall reads a regular file of at most limit bytes, through no symlink.
func readSmall(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > limit {
		return nil, fmt.Errorf("%s is no file of at most %d bytes", path, limit)
	}
	return io.ReadAll(io.LimitReader(f, limit))
}
