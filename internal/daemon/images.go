//go:build linux

package daemon

import (
	"context"
	"fmt"
	"path/filepath"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/daemon/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/image/adopt"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
	"github.com/holdpoint/holdpoint/internal/image/recipefile"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// imageAPI serves ImageService.
type imageAPI struct{ *Daemon }

func (d *Daemon) buildConfig() image.BuildConfig {
	return image.BuildConfig{FS: d.cfg.Files, ImagesDir: d.cfg.Home.Images(), CacheDir: d.cfg.Home.Cache(), LogDir: d.cfg.Home.LogDir()}
}

// Build builds an image and gives it its name.
func (d imageAPI) Build(ctx context.Context, req *connect.Request[holdpointv1.BuildImageRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	name := r.GetName()
	if name == "" {
		name = r.GetRecipe()
	}
	if err := machine.CheckName("image", name); err != nil {
		return nil, wire.Encode(err)
	}
	return d.desk.Begin(ctx, r.GetRequestId(), "image build", r, admission.BuildDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		cfg, err := d.orderOf(r)
		if err != nil {
			return nil, err
		}
		built, err := d.cfg.Host.BuildImage(ctx, cfg, progressOf(w))
		if err != nil {
			return nil, err
		}
		from := "the recipe " + built.Recipe
		if r.GetRecipeFile() != "" {
			from = filepath.Base(r.GetRecipeFile())
		}
		return d.recordImage(ctx, built, name, "built from "+from)
	})
}

// orderOf says what to build: what the request says, or a file.
func (d imageAPI) orderOf(r *holdpointv1.BuildImageRequest) (image.BuildConfig, error) {
	cfg := d.buildConfig()
	if r.GetRecipeFile() == "" {
		cfg.Recipe, cfg.Packages, cfg.Script, cfg.DiskBytes = r.GetRecipe(), r.GetPackages(), r.GetScript(), r.GetDiskBytes()
		return cfg, nil
	}
	if !filepath.IsAbs(r.GetRecipeFile()) || r.GetRecipe()+r.GetScript() != "" || len(r.GetPackages()) > 0 || r.GetDiskBytes() != 0 {
		return cfg, errdefs.New(errdefs.Invalid, "build image: a recipe file %q is given by its absolute path, and says all but the name", r.GetRecipeFile())
	}
	order, err := recipefile.Read(r.GetRecipeFile())
	if err != nil {
		return cfg, err
	}
	cfg.Packages, cfg.User, cfg.Script, cfg.DiskBytes = order.Packages, order.User, order.Script, order.DiskBytes
	if order.Files != nil {
		cfg.Files = order.Files
	}
	return cfg, nil
}

// progressOf shows an image's progress as that of its operation.
func progressOf(w *operation.Work) func(image.Progress) {
	phase := ""
	return func(p image.Progress) {
		if p.Phase != phase {
			phase = p.Phase
			w.Say(phase)
		}
		w.Progress(p.Done, p.Total)
	}
}

// Import makes an image of a disk that somebody else made.
func (d imageAPI) Import(ctx context.Context, req *connect.Request[holdpointv1.ImportImageRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	if err := machine.CheckName("image", r.GetName()); err != nil {
		return nil, wire.Encode(err)
	}
	return d.desk.Begin(ctx, r.GetRequestId(), "image import", r, admission.BuildDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		from, err := d.kernelSource(ctx)
		if err != nil {
			return nil, err
		}
		made, notes, err := d.cfg.Host.ImportImage(ctx, adopt.Config{
			FS: d.cfg.Files, ImagesDir: d.cfg.Home.Images(), Path: r.GetPath(), Kernel: r.GetKernel(), Initrd: r.GetInitrd(),
			KernelFrom: from, SHA256: r.GetSha256(), Partition: int(r.GetPartition()), Tag: r.GetTag(), DiskBytes: r.GetDiskBytes(),
		}, progressOf(w))
		if err != nil {
			return nil, err
		}
		// An image has one name, and this must not take it away.
		there, err := d.catalog.GetImage(ctx, made.BuildID)
		if err == nil && there.Name != "" && there.Name != r.GetName() {
			return nil, errdefs.New(errdefs.AlreadyExists, "import image %q: this disk is image %s already; use that", r.GetName(), there.Name)
		}
		for _, note := range notes {
			w.Note("%s", note)
		}
		return d.recordImage(ctx, made, r.GetName(), "imported from "+filepath.Base(r.GetPath()))
	})
}

// kernelSource is the folder of the image whose kernel container images get; empty
// where it was not built yet.
func (d imageAPI) kernelSource(ctx context.Context) (string, error) {
	i, err := d.catalog.ResolveImage(ctx, recipe.Name)
	if errdefs.Is(err, errdefs.NotFound) || err == nil && i.Name != recipe.Name {
		return "", nil
	}
	return filepath.Join(d.cfg.Home.Images(), i.BuildID), err
}

func (d imageAPI) recordImage(ctx context.Context, built image.Image, name, description string) (*holdpointv1.OperationResult, error) {
	stored, err := built.StoredBytes()
	if err != nil {
		return nil, err
	}
	err = d.catalog.PutImage(ctx, catalog.Image{
		BuildID: built.BuildID, Name: name, Architecture: built.Architecture, KernelVersion: built.KernelVersion,
		DiskBytes: built.DiskBytes, StoredBytes: stored, Packages: built.Packages, CreatedAt: built.CreatedAt,
		Description: description,
	})
	if err != nil {
		return nil, err
	}
	recorded, err := d.catalog.GetImage(ctx, built.BuildID)
	if err != nil {
		return nil, err
	}
	return &holdpointv1.OperationResult{Image: view.Image(recorded)}, nil
}

// List gives all images, newest first.
func (d imageAPI) List(ctx context.Context, _ *connect.Request[holdpointv1.ListImagesRequest]) (*connect.Response[holdpointv1.ListImagesResponse], error) {
	images, err := d.catalog.ListImages(ctx)
	if err != nil {
		return nil, wire.Encode(err)
	}
	out := &holdpointv1.ListImagesResponse{}
	for _, i := range images {
		out.Images = append(out.Images, view.Image(i))
	}
	return connect.NewResponse(out), nil
}

// Get gives one image.
func (d imageAPI) Get(ctx context.Context, req *connect.Request[holdpointv1.GetImageRequest]) (*connect.Response[holdpointv1.Image], error) {
	i, err := d.catalog.ResolveImage(ctx, req.Msg.GetImage())
	if err != nil {
		return nil, wire.Encode(err)
	}
	made, err := image.Open(filepath.Join(d.cfg.Home.Images(), i.BuildID))
	if err != nil {
		d.cfg.Log.Warn("open an image", "image", i.BuildID, "error", err) // the catalog knows the rest
	}
	shown := view.Image(i)
	shown.User, shown.Env, shown.WorkingDir, shown.Command = made.Defaults.User, made.Defaults.Env, made.Defaults.WorkingDir, made.Defaults.Command
	return connect.NewResponse(shown), nil
}

// Remove forgets an image and removes its files.
func (d imageAPI) Remove(ctx context.Context, req *connect.Request[holdpointv1.RemoveImageRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	return d.desk.Begin(ctx, r.GetRequestId(), "image rm", r, admission.QuickDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		i, err := d.catalog.ResolveImage(ctx, r.GetImage())
		if err != nil {
			return nil, err
		}
		claim := catalog.Claim{Kind: catalog.ImageResource, ID: i.BuildID, Exclusive: true}
		if err := d.catalog.Acquire(ctx, w.ID(), admission.LeaseTime, claim); err != nil {
			return nil, err
		}
		if err := d.catalog.RemoveImage(ctx, i.BuildID, w.ID()); err != nil {
			return nil, err
		}
		if err := image.Remove(d.cfg.Files, d.cfg.Home.Images(), d.cfg.Home.Cache(), i.BuildID); err != nil {
			return nil, fmt.Errorf("image %s is forgotten, but its files are not all removed: %w", r.GetImage(), err)
		}
		return &holdpointv1.OperationResult{Image: view.Image(i)}, nil
	})
}
