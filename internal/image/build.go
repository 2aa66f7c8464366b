package image

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
	"github.com/holdpoint/holdpoint/internal/undo"
)

// Sizes of a root disk, in bytes.
const (
	DefaultDisk = 8 << 30
	MinDisk     = 1 << 30
)

// maxScript is the longest script, in bytes.
const maxScript = 1 << 20

// BuildConfig says what to build, and where.
type BuildConfig struct {
	// FS writes what is to stay; nil for the real one.
	FS *durable.FS
	// ImagesDir gets the image's folder; CacheDir and LogDir are for what can be
	// made again and for the tools' output. They exist, private to the user.
	ImagesDir, CacheDir, LogDir string
	// TempDir is where an ordinary user's build unpacks packages, as ids that
	// may enter none of the above: every folder on its path lets others pass
	// through. Empty for /var/tmp.
	TempDir string
	// Recipe is "debian" or empty for it, or "debian-systemd".
	Recipe string
	// Packages are installed besides the recipe's.
	Packages []string
	// Script is run as root in the tree when the packages are installed, by
	// its #! line or, without one, by sh; empty for none.
	Script string
	// DiskBytes is the size of the root disk, whole MiB; 0 for DefaultDisk.
	DiskBytes int64
	// Files are put into the tree before the script runs; nil for none.
	Files recipe.Files
	// User is created, and is whom the programs of the image's machines run as;
	// empty for root.
	User string
	// Fresh builds from packages even if the same were installed for a build
	// of the last days.
	Fresh bool
}

func (cfg BuildConfig) withDefaults() BuildConfig {
	if cfg.TempDir == "" {
		cfg.TempDir = "/var/tmp"
	}
	if cfg.Recipe == "" {
		cfg.Recipe = recipe.Name
	}
	if cfg.DiskBytes == 0 {
		cfg.DiskBytes = DefaultDisk
	}
	return cfg
}

func (cfg BuildConfig) store() recipe.Store {
	return recipe.Store{FS: cfg.FS, Dir: filepath.Join(cfg.CacheDir, "trees"), TempDir: cfg.TempDir, Now: time.Now}
}

func (cfg BuildConfig) check() error {
	switch {
	case cfg.Recipe != recipe.Name && cfg.Recipe != recipe.Systemd:
		return errdefs.New(errdefs.Invalid, "recipe %q: there are %s and %s", cfg.Recipe, recipe.Name, recipe.Systemd)
	case cfg.DiskBytes < MinDisk || cfg.DiskBytes > machine.MaxDisk || cfg.DiskBytes%(1<<20) != 0:
		return errdefs.New(errdefs.Invalid, "disk size %d: give whole MiB from %d GiB to %d GiB", cfg.DiskBytes, MinDisk>>30, int64(machine.MaxDisk)>>30)
	case len(cfg.Script) > maxScript:
		return errdefs.New(errdefs.Invalid, "script: it is longer than %d bytes", maxScript)
	}
	return nil
}

// Progress is how far a build has come.
type Progress struct {
	// Phase is what is being done, for people.
	Phase string
	// Done and Total are bytes of the phase; Total is 0 when it is not known.
	Done, Total int64
}

// Build builds an image and returns it, durable, in its folder. progress is
// called from one goroutine at a time, until Build returns. When it fails, or
// ctx ends, nothing but the log is left. Missing tools are UNSUPPORTED and a
// full disk NO_SPACE, each with the remedy; packages or a script that do not
// work are INVALID with the name of the log.
func Build(ctx context.Context, cfg BuildConfig, progress func(Progress)) (Image, error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return Image{}, fmt.Errorf("build image: %w", err)
	}
	if err := recipe.Missing(recipe.Requirements(ctx)); err != nil {
		return Image{}, fmt.Errorf("build image: %w", err)
	}
	debian, init, err := cfg.recipe(ctx)
	if err != nil {
		return Image{}, fmt.Errorf("build image: %w", err)
	}
	b := build{cfg: cfg, recipe: debian, store: cfg.store(), progress: progress}
	b.manifest = Manifest{
		Recipe: cfg.Recipe, Init: init, Packages: debian.Packages(), ScriptSHA256: debian.ScriptSHA256(), DiskBytes: cfg.DiskBytes,
	}
	// A build takes much memory, a daemon between builds little.
	defer debug.FreeOSMemory()
	img, err := b.run(ctx)
	if err != nil {
		return Image{}, fmt.Errorf("build image: %w", err)
	}
	return img, nil
}

// recipe is the recipe, and who process 1 is in what it makes.
func (cfg BuildConfig) recipe(ctx context.Context) (r *recipe.Debian, init string, err error) {
	more := recipe.Additions{Packages: cfg.Packages, User: cfg.User, Files: cfg.Files, Script: cfg.Script}
	if cfg.Recipe == recipe.Systemd {
		r, err = recipe.NewSystemd(ctx, cfg.store(), more)
		return r, machine.InitSystem, err
	}
	r, err = recipe.NewDebian(ctx, more)
	return r, "", err
}

// build is one build under way.
type build struct {
	cfg      BuildConfig
	recipe   recipe.Recipe
	store    recipe.Store
	manifest Manifest
	progress func(Progress)

	log   *recipe.Log
	stage *Stage
}

// run makes the folder step by step: the tree (from the cache, or by the
// recipe), the three files, the manifest, the rename that makes it an image.
func (b *build) run(ctx context.Context) (Image, error) {
	if err := b.checkSpace(); err != nil {
		return Image{}, err
	}
	log, err := recipe.NewLog(b.cfg.LogDir, func(step string) { b.report(step, 0, 0) })
	if err != nil {
		return Image{}, err
	}
	b.log = log
	defer log.Close()
	if err := b.bootstrap(ctx); err != nil {
		return Image{}, err
	}
	var stack undo.Stack
	defer stack.Run()
	if b.stage, err = NewStage(b.cfg.FS, b.cfg.ImagesDir, b.manifest, &stack); err != nil {
		return Image{}, err
	}
	if err := b.fill(ctx); err != nil {
		return Image{}, err
	}
	img, err := b.stage.Publish(ctx)
	if err != nil {
		return Image{}, err
	}
	stack.Release()
	return img, nil
}

func (b *build) report(phase string, done, total int64) {
	if b.progress != nil {
		b.progress(Progress{Phase: phase, Done: done, Total: total})
	}
}

// bootstrap makes the tree unless the cache has it.
func (b *build) bootstrap(ctx context.Context) error {
	if !b.cfg.Fresh && b.store.Has(b.recipe.Key()) {
		b.report("using the packages of an earlier build", 0, 0)
		return nil
	}
	b.report("installing packages", 0, 0)
	return b.store.Make(ctx, b.recipe, b.log)
}

// fill writes the image's files into the stage. A tree that the cache kept
// badly is made again, once.
func (b *build) fill(ctx context.Context) error {
	made, err := b.unpack(ctx)
	if errors.Is(err, recipe.ErrDamaged) && ctx.Err() == nil {
		if err := b.store.Drop(b.recipe.Key()); err != nil {
			return err
		}
		if err := b.bootstrap(ctx); err != nil {
			return err
		}
		made, err = b.unpack(ctx)
	}
	if err != nil {
		return err
	}
	b.report("computing digests", 0, 0)
	boot, err := NewBoot(made.version, made.kernel, made.inOrder())
	if err != nil {
		return err
	}
	return b.stage.Fill(ctx, boot, defaults.Defaults{User: b.cfg.User})
}

// Requirements finds out what of what building and booting images wants is
// there, for a person to read.
func Requirements(ctx context.Context) []recipe.Requirement {
	all := recipe.Requirements(ctx)
	agent := recipe.Requirement{Name: "guest agent", OK: true, Detail: "embedded"}
	if _, err := guestAgent(); err != nil {
		agent = recipe.Requirement{Name: "guest agent", Detail: "this build of holdpoint has none", Fix: "run: make"}
	}
	return append(all, agent)
}
