// Package recipe makes the file tree that an image's root disk is made of: from
// Debian packages with mmdebstrap, as root or as an ordinary user, and keeps
// the trees it made for a while. It makes no disk and knows no image.
package recipe

import (
	"context"
	"crypto/sha256"
	_ "embed" // the recipe's scripts
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// The steps of the recipe, run by mmdebstrap as root of the tree, from outside
// it, when its packages are installed.
var (
	//go:embed steps/kernel.sh
	kernelStep string
	//go:embed steps/user.sh
	userStep string
	//go:embed steps/base.sh
	baseStep string
	//go:embed steps/systemd.sh
	systemdStep string
	//go:embed steps/script.sh
	scriptStep string
	//go:embed steps/finish.sh
	finishStep string
)

// The recipe.
const (
	// Name is what people call it. Systemd is the same with an init of its own.
	Name    = "debian"
	Systemd = "debian-systemd"
	suite   = "bookworm"

	// MaxPackages is how many packages a tree may be asked for.
	MaxPackages = 1000

	// Extra is the folder of a tree with what is not for the root disk: the
	// files kernel, and version with the kernel's version and a line feed.
	Extra = ".holdpoint"
)

var packagePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]*(=[A-Za-z0-9.+:~-]+)?$`)

// recipePackages are in every image: what the recipe promises, then what a
// kernel's modules and network programs need besides.
func recipePackages() []string {
	return []string{
		"nginx", "python3", "git", "curl", "ca-certificates", "procps", "iproute2", "openssh-client",
		"kmod", "netbase",
	}
}

// systemdPackages are what Systemd has besides: the init, what its device units and
// users' sessions need, and the clock's keeper.
func systemdPackages() []string {
	return []string{"systemd-sysv", "udev", "dbus", "dbus-user-session", "libpam-systemd", "systemd-timesyncd"}
}

// inputs are all that decides what tree the recipe makes, but for the mirror's
// content at that moment.
type inputs struct {
	// Steps is the digest of the recipe's own steps.
	Steps    string   `json:"steps"`
	Suite    string   `json:"suite"`
	Packages []string `json:"packages"`
	Script   string   `json:"script"`
	Sources  []string `json:"sources"`
	User     string   `json:"user,omitempty"`
	Files    string   `json:"files,omitempty"`
	// Base is the key of the tree that this one is made of; empty for none.
	Base string `json:"base,omitempty"`
}

// key is what the tree of the inputs is kept under.
func (in inputs) key() string {
	h := sha256.New()
	// Strings and lists of them cannot fail to be encoded.
	_ = json.NewEncoder(h).Encode(in)
	return hex.EncodeToString(h.Sum(nil)[:16])
}

func digestOf(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

// Recipe makes a tree.
type Recipe interface {
	// Key identifies the tree that Bootstrap would make: 32 hexadecimal digits.
	Key() string
	// Bootstrap writes the tree as a tar, and the tools' output to log. work
	// is an empty folder that every user may pass through.
	Bootstrap(ctx context.Context, tree io.Writer, work string, log *Log) error
}

// Debian makes the tree with mmdebstrap, in a mount (and, for an ordinary user,
// user) namespace of its own: nothing is mounted in ours, and all is gone with
// its processes.
type Debian struct {
	inputs  inputs
	more    Additions
	options []string
	// base makes the tree that this one adds to; nil for none. It is kept in store.
	base  *Debian
	store Store
}

// Additions are what an image has besides the recipe's own.
type Additions struct {
	// Packages are installed.
	Packages []string
	// User is created then, with the id 1000; empty for none.
	User string
	// Files are put into the tree then; nil for none.
	Files Files
	// Script is run as root in the tree at last, by its #! line or, without one, by
	// sh; empty for none.
	Script string
}

// Files are a tar that can be written more than once.
type Files interface {
	WriteTar(ctx context.Context, w io.Writer) error
}

// UserID is the id of a user that is created, and of its group.
const UserID = 1000

// NewDebian reads the host's apt configuration. Bad package names are INVALID.
func NewDebian(ctx context.Context, more Additions) (*Debian, error) {
	packages, err := packageList(more.Packages)
	if err != nil {
		return nil, err
	}
	osRelease, _ := os.ReadFile("/etc/os-release") // without it: no release known
	sources, err := hostSources(os.DirFS("/etc"), suite, hostCodename(string(osRelease)))
	if err != nil {
		return nil, err
	}
	config := exec.CommandContext(ctx, "apt-config", "dump")
	config.Env = append(os.Environ(), "LC_ALL=C")
	dump, err := config.Output()
	if err != nil {
		return nil, fmt.Errorf("run apt-config dump: %w", err)
	}
	d := &Debian{more: more, options: hostOptions(string(dump))}
	d.inputs = inputs{
		Steps: digestOf(kernelStep + "\x00" + scriptStep + "\x00" + finishStep),
		Suite: suite, Packages: packages, Sources: sources,
	}
	if more.Script != "" {
		d.inputs.Script = digestOf(more.Script)
	}
	if more.User != "" {
		d.inputs.User = more.User + " " + digestOf(userStep)
	}
	if more.Files != nil {
		d.inputs.Files, err = writeFiles(ctx, more.Files, io.Discard)
	}
	return d, err
}

// writeFiles returns the digest of what it writes.
func writeFiles(ctx context.Context, files Files, w io.Writer) (string, error) {
	h := sha256.New()
	if err := files.WriteTar(ctx, io.MultiWriter(h, w)); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// NewSystemd is NewDebian for a tree with an init of its own. It adds to the tree
// of NewDebian, which store keeps: who wants both has what they share made once.
func NewSystemd(ctx context.Context, store Store, more Additions) (*Debian, error) {
	base, err := NewDebian(ctx, Additions{})
	if err != nil {
		return nil, err
	}
	more.Packages = slices.Concat(systemdPackages(), more.Packages)
	d, err := NewDebian(ctx, more)
	if err != nil {
		return nil, err
	}
	d.base, d.store = base, store
	d.inputs.Base = base.Key()
	d.inputs.Steps = digestOf(d.inputs.Steps + baseStep + systemdStep)
	return d, nil
}

// arguments is mmdebstrap's command line; script, files and base are the paths of
// the user's script, of a tar, and of the base's tree, empty without one.
func (d *Debian) arguments(script, files, base string) []string {
	variant, packages := "minbase", d.inputs.Packages
	if base != "" {
		variant = "custom"
		packages = slices.DeleteFunc(slices.Clone(packages), func(name string) bool { return slices.Contains(d.base.inputs.Packages, name) })
	}
	args := []string{
		"mmdebstrap", "--mode=unshare", "--variant=" + variant, "--format=tar", "--verbose",
		"--architectures=amd64", "--include=" + strings.Join(packages, ","),
		// A build that a power cut ends is thrown away: syncing only costs time.
		"--dpkgopt=force-unsafe-io",
	}
	for _, option := range d.options {
		args = append(args, "--aptopt="+option)
	}
	if base == "" {
		args = append(args, "--customize-hook="+kernelStep)
	} else {
		args = append(args, "--setup-hook=base="+quoteWord(base)+"\n"+baseStep, "--customize-hook="+systemdStep)
	}
	if d.more.User != "" {
		args = append(args, "--customize-hook=user="+quoteWord(d.more.User)+"\n"+userStep)
	}
	if files != "" {
		args = append(args, "--customize-hook=tar-in "+quoteWord(files)+" /")
	}
	if script != "" {
		args = append(args,
			"--customize-hook=upload "+quoteWord(script)+" /tmp/holdpoint-script",
			"--customize-hook="+scriptStep)
	}
	args = append(args, "--customize-hook="+finishStep, d.inputs.Suite, "-")
	return append(args, d.inputs.Sources...)
}

// Key implements Recipe.
func (d *Debian) Key() string { return d.inputs.key() }

// Packages are those asked for, sorted, each once.
func (d *Debian) Packages() []string { return d.inputs.Packages }

// ScriptSHA256 is the digest of the script; empty without one.
func (d *Debian) ScriptSHA256() string { return d.inputs.Script }

// Bootstrap implements Recipe.
func (d *Debian) Bootstrap(ctx context.Context, tree io.Writer, work string, log *Log) error {
	private := filepath.Join(work, "private")
	if err := os.Mkdir(private, 0o700); err != nil {
		return storage("keep what is added in %s: %w", private, err)
	}
	script, files := "", ""
	if d.more.Script != "" {
		script = filepath.Join(private, "script")
		if err := os.WriteFile(script, []byte(d.more.Script), 0o600); err != nil {
			return storage("keep the script in %s: %w", script, err)
		}
	}
	if d.more.Files != nil {
		files = filepath.Join(private, "files")
		if err := d.keepFiles(ctx, files); err != nil {
			return err
		}
	}
	base, err := d.unpackBase(ctx, work, log)
	if err != nil {
		return err
	}
	err = Command{Args: d.arguments(script, files, base), Env: []string{"TMPDIR=" + work}, Stdout: tree, Stderr: log}.Run(ctx)
	if err == nil || ctx.Err() != nil {
		return err
	}
	return d.explain(err, log)
}

// keepFiles writes the files' tar, which is the one that the tree is kept under.
func (d *Debian) keepFiles(ctx context.Context, path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return storage("keep the files in %s: %w", path, err)
	}
	defer f.Close()
	sum, err := writeFiles(ctx, d.more.Files, f)
	switch {
	case err != nil:
		return err
	case sum != d.inputs.Files:
		return errdefs.New(errdefs.Conflict, "the recipe's files changed while they were read; build again when nothing writes to them")
	}
	return storage("keep the files in %s: %w", path, f.Close())
}

// unpackBase makes the base's tree, unless it is kept, and leaves it as a tar that
// the recipe's steps can read.
func (d *Debian) unpackBase(ctx context.Context, work string, log *Log) (string, error) {
	if d.base == nil {
		return "", nil
	}
	if !d.store.Has(d.base.Key()) {
		if err := d.store.Make(ctx, d.base, log); err != nil {
			return "", err
		}
	}
	tree, err := d.store.Open(d.base.Key())
	if err != nil {
		return "", err
	}
	defer tree.Close()
	path := filepath.Join(work, "base.tar")
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return "", storage("unpack %s: %w", path, err)
	}
	_, err = io.Copy(out, tree)
	// An ordinary user's build reads it as another user.
	if err = errors.Join(err, out.Chmod(0o644), out.Close()); errors.Is(err, ErrDamaged) {
		err = errors.Join(err, d.store.Drop(d.base.Key()))
	}
	return path, err
}

// explain makes one line of what mmdebstrap printed.
func (d *Debian) explain(err error, log *Log) error {
	reason := log.Reason()
	if reason == "" {
		reason = err.Error()
	}
	kind := errdefs.Internal
	switch {
	case log.SawFull():
		kind = errdefs.NoSpace
	case strings.Contains(reason, "Unable to locate package"), strings.Contains(reason, "has no installation candidate"),
		strings.HasPrefix(reason, "the script"):
		kind = errdefs.Invalid
	}
	return errdefs.New(kind, "install the packages: %s; all output is in %s", reason, log.Path())
}

// CheckPackages refuses (INVALID) what cannot be names of packages.
func CheckPackages(names []string) error {
	for _, name := range names {
		if !packagePattern.MatchString(name) {
			return errdefs.New(errdefs.Invalid, "package %q: give a Debian package's name, or name=version", name)
		}
	}
	return nil
}

// packageList merges the recipe's packages with the user's; sorted, each once.
func packageList(more []string) ([]string, error) {
	if err := CheckPackages(more); err != nil {
		return nil, err
	}
	all := slices.Concat(recipePackages(), more)
	if len(all) > MaxPackages {
		return nil, errdefs.New(errdefs.Invalid, "packages: %d are more than %d; install them in --script", len(all), MaxPackages)
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// quoteWord makes one word of s for mmdebstrap's special hooks, which are split
// as a shell does.
func quoteWord(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
