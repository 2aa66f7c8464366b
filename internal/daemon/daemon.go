//go:build linux

// Package daemon serves the API of one home: it resolves names, admits
// operations, takes leases, holds what has to wait, and settles what an
// earlier daemon left unfinished. How machines run, checkpoints are taken and
// restores are made is said in the packages below it.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/cgroup"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/checkpoints"
	"github.com/holdpoint/holdpoint/internal/daemon/firstboot"
	"github.com/holdpoint/holdpoint/internal/daemon/guest"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/daemon/idle"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/machines"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/daemon/proof"
	"github.com/holdpoint/holdpoint/internal/daemon/reserve"
	"github.com/holdpoint/holdpoint/internal/daemon/revive"
	"github.com/holdpoint/holdpoint/internal/daemon/settle"
	"github.com/holdpoint/holdpoint/internal/daemon/shorten"
	"github.com/holdpoint/holdpoint/internal/daemon/slumber"
	"github.com/holdpoint/holdpoint/internal/daemon/socket"
	"github.com/holdpoint/holdpoint/internal/daemon/standby"
	"github.com/holdpoint/holdpoint/internal/daemon/view"
	"github.com/holdpoint/holdpoint/internal/diskchain"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/image/adopt"
	"github.com/holdpoint/holdpoint/internal/memory"
	"github.com/holdpoint/holdpoint/internal/restore"
	"github.com/holdpoint/holdpoint/internal/undo"
)

// Host is what a daemon needs of the host besides runs.
type Host interface {
	capture.Overlays
	diskchain.Merger
	keeper.Booter
	// BuildImage builds an image; see image.Build.
	BuildImage(ctx context.Context, cfg image.BuildConfig, progress func(image.Progress)) (image.Image, error)
	// ImportImage makes an image of what somebody else made; see adopt.Import.
	ImportImage(ctx context.Context, cfg adopt.Config, progress func(image.Progress)) (image.Image, []string, error)
	// Groups holds runs to limits.
	Groups() *cgroup.Tree
	// Checks says what of the host works.
	Checks(ctx context.Context) []Check
}

// Check is one thing of the host that doctor looks at.
type Check struct {
	Name string
	// State is "ok", "degraded" or "failed".
	State  string
	Detail string
	// Fix is what to do; empty when ok.
	Fix string
}

// Config is what a daemon is made of.
type Config struct {
	Home  *home.Home
	Files *durable.FS
	Host  Host
	// MonitorCommand is the hidden verb's program and first arguments.
	MonitorCommand []string
	Build          string
	// Verify says when checkpoints are verified unasked; see proof.Config.
	Verify string
	// NoFirstBoots boots every new machine, and keeps no boot of an image.
	NoFirstBoots bool
	Log          *slog.Logger
}

// Daemon is the one daemon of a home. Its life: Open takes the home's lock and
// settles what was left; Serve answers calls until Stop is asked for or ctx
// ends; Close lets go of the machines, which run on.
type Daemon struct {
	cfg         Config
	started     time.Time
	lock        *durable.Lock
	catalog     *catalog.Catalog
	gates       *hold.Gates
	engine      *operation.Engine
	keeper      *keeper.Keeper
	memory      *memory.Cache
	chains      *diskchain.Chains
	capturer    *capture.Capturer
	reserve     *reserve.Reserve
	view        *view.Viewer
	desk        *admission.Desk
	guest       *guest.Service
	machines    *machines.Service
	checkpoints *checkpoints.Service
	pools       *standby.Pools
	prover      *proof.Prover
	shortener   *shorten.Shortener
	slumber     *slumber.Watch
	reviver     *revive.Watch
	settler     *settle.Settler
	stop        chan struct{}
	stopOnce    sync.Once

	mu sync.Mutex
	// proxy is nil until it listens.
	proxy Proxy
}

// Proxy is what serves the published routes.
type Proxy interface {
	// Addr is where it listens for requests of HTTP.
	Addr() string
	// Reserve listens on a port of the host's loopback for a TCP route, which
	// has to be in the catalog when release is called. CONFLICT is a port that
	// somebody else has.
	Reserve(port int) (release func(), err error)
	// Problem is why the port of a TCP route is not listened on; nil while it is.
	Problem(port int) error
	// Settle is called after each operation, when routes and machines may be
	// others.
	Settle(ctx context.Context)
}

// Open makes a daemon of the home. A home that has one is a CONFLICT.
func Open(ctx context.Context, cfg Config) (*Daemon, error) {
	var steps undo.Stack
	defer steps.Run()
	if err := cfg.Home.Create(); err != nil {
		return nil, err
	}
	lock, err := cfg.Files.Lock(cfg.Home.Lock())
	if err != nil {
		return nil, fmt.Errorf("take home %s: %w", cfg.Home.Dir(), err)
	}
	steps.Add(func() { _ = lock.Unlock() }) // the process ends
	// What a crash left half-written is nobody's under the lock.
	if err := cfg.Files.RemoveTemps(cfg.Home.Dir()); err != nil {
		return nil, err
	}
	cat, err := catalog.Open(ctx, catalog.Config{Path: cfg.Home.Catalog(), FS: cfg.Files})
	if err != nil {
		return nil, err
	}
	steps.Add(func() { _ = cat.Close() }) // nothing was written
	d := &Daemon{
		cfg: cfg, started: time.Now(), lock: lock, catalog: cat, gates: hold.New(), stop: make(chan struct{}),
	}
	if d.memory, err = memory.New(memory.Config{Home: cfg.Home, Files: cfg.Files, Catalog: cat, Log: cfg.Log}); err != nil {
		return nil, err
	}
	d.make(cat)
	steps.Add(d.release)
	d.settler = settle.New(settle.Config{
		Home: cfg.Home, Files: cfg.Files, Catalog: cat, Engine: d.engine, Keeper: d.keeper, Capturer: d.capturer, Chains: d.chains,
		Restorer: d.machines.Restorer, Pools: d.pools, Gates: d.gates, View: d.view, Images: d.buildConfig(), Log: cfg.Log,
	})
	if err := d.settler.Settle(ctx); err != nil {
		return nil, err
	}
	d.sweepDisks(ctx)
	d.tend(ctx)
	steps.Release()
	return d, nil
}

// make makes the daemon's parts. None of them does anything yet.
func (d *Daemon) make(cat *catalog.Catalog) {
	cfg := d.cfg
	d.capturer = capture.New(capture.Config{
		Catalog: cat, Files: cfg.Files, Home: cfg.Home, Overlays: cfg.Host, Memory: d.memory,
		Trust: func(ctx context.Context, layers ...string) error { return d.prover.TrustLayers(ctx, layers...) },
	})
	d.reserve = reserve.New(cfg.Home.Reserve())
	d.engine = operation.New(operation.Config{
		Journal: cat, Log: cfg.Log, Ended: d.sweep, Room: d.reserve.Release,
		Settle: func(ctx context.Context, w *operation.Work, op catalog.Operation) (*holdpointv1.OperationResult, error) {
			return d.settler.Again(ctx, w, op)
		},
	})
	d.chains = diskchain.New(diskchain.Config{Home: cfg.Home, Files: cfg.Files, Merger: cfg.Host, Idle: proof.Idle, Log: cfg.Log})
	d.keeper = keeper.New(keeper.Config{
		Home: cfg.Home, Files: cfg.Files, Catalog: cat, Gates: d.gates, Booter: cfg.Host, Chains: d.chains, Memory: d.memory,
		Groups: cfg.Host.Groups(), MonitorCommand: cfg.MonitorCommand, Build: cfg.Build, Log: cfg.Log, Ended: d.ended,
	})
	d.view = &view.Viewer{
		Catalog: cat, Keeper: d.keeper, Path: d.capturer.Path, Proxy: func() string { return d.doors().Addr() },
		Trouble: func(id string) string { return d.reviver.Trouble(id) },
		Problem: func(port int) error { return d.doors().Problem(port) },
	}
	d.prover = proof.New(proof.Config{
		Home: cfg.Home, Files: cfg.Files, Catalog: cat, Keeper: d.keeper, Memory: d.memory, Capturer: d.capturer, Overlays: cfg.Host, Engine: d.engine,
		When: cfg.Verify, Log: cfg.Log,
	})
	d.shortener = shorten.New(shorten.Config{Catalog: cat, Keeper: d.keeper, Log: cfg.Log})
	d.desk = &admission.Desk{
		Catalog: cat, Engine: d.engine, Gates: d.gates, Keeper: d.keeper, Capturer: d.capturer,
		Reserve: d.reserve, View: d.view, Prover: d.prover, Log: cfg.Log,
	}
	d.pools = standby.New(standby.Config{Catalog: cat, Keeper: d.keeper, Capturer: d.capturer, Engine: d.engine, Log: cfg.Log})
	d.machines = machines.New(machines.Config{
		Desk: d.desk, Pools: d.pools,
		Rest:     func(ctx context.Context, m catalog.Machine) (bool, error) { return d.reviver.Rest(ctx, m) },
		Restorer: restore.New(restore.Config{Catalog: cat, Capturer: d.capturer, Memory: d.memory}),
		Boots:    firstboot.New(firstboot.Config{Catalog: cat, Keeper: d.keeper, Capturer: d.capturer, Off: cfg.NoFirstBoots, Log: cfg.Log}),
	})
	d.checkpoints = checkpoints.New(checkpoints.Config{Desk: d.desk, Pools: d.pools})
	d.slumber = slumber.New(slumber.Config{
		Catalog: cat, Gates: d.gates, Keeper: d.keeper, Log: cfg.Log,
		Suspend: d.machines.SuspendIdle, Resume: d.machines.ResumeAsleep,
	})
	d.reviver = revive.New(revive.Config{Catalog: cat, Keeper: d.keeper, Start: d.machines.StartAgain, Log: cfg.Log})
	d.guest = guest.New(guest.Config{Catalog: cat, Gates: d.gates, Keeper: d.keeper, Home: cfg.Home, Wake: d.slumber.Wake})
}

// release lets go of all that is kept, which goes on.
func (d *Daemon) release() {
	d.slumber.Close()
	d.reviver.Close()
	d.prover.Close()
	d.shortener.Close()
	d.pools.Close()
	d.keeper.Close()
}

// Listen makes the daemon's socket. The home's lock says that nobody else
// listens there.
func (d *Daemon) Listen() (net.Listener, error) {
	return socket.Listen(socket.Config{Path: d.cfg.Home.Socket(), Files: d.cfg.Files, Log: d.cfg.Log})
}

// Serve answers calls on l until ctx ends or Stop is called. Calls under way
// get a moment to end.
func (d *Daemon) Serve(ctx context.Context, l net.Listener) error {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{
		Handler: idle.Handler(d.Handler()), Protocols: protocols, ReadHeaderTimeout: 10 * time.Second,
		HTTP2:    &http.HTTP2Config{MaxReceiveBufferPerConnection: 16 << 20, MaxReceiveBufferPerStream: 4 << 20, MaxReadFrameSize: 1 << 20},
		ErrorLog: slog.NewLogLogger(d.cfg.Log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve %s: %w", l.Addr(), err)
	case <-ctx.Done():
	case <-d.stop:
	}
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := server.Shutdown(ending); err != nil {
		// Streams that go on, such as an open shell, are cut off.
		_ = server.Close()
	}
	<-served
	return nil
}

// Stop makes Serve return. It may be called more than once.
func (d *Daemon) Stop() { d.stopOnce.Do(func() { close(d.stop) }) }

// Stopping is closed when Stop was called.
func (d *Daemon) Stopping() <-chan struct{} { return d.stop }

// SetProxy tells the daemon what serves its routes.
func (d *Daemon) SetProxy(p Proxy) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.proxy = p
}

// doors is what serves the routes; it refuses until it listens.
func (d *Daemon) doors() Proxy {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.proxy == nil {
		return noProxy{}
	}
	return d.proxy
}

// Close waits until ctx ends for running operations, then lets go of
// everything. What was not done by then is settled at the next start.
func (d *Daemon) Close(ctx context.Context) error {
	d.prover.Stop()
	d.shortener.Stop()
	d.reviver.Stop()
	err := d.engine.Close(ctx)
	d.release()
	return errors.Join(err, d.catalog.Close(), d.lock.Unlock())
}

// sweep removes, after an operation, layers and ended runs that nothing needs
// any more, and lets the proxy look at its connections.
func (d *Daemon) sweep(ctx context.Context) {
	d.doors().Settle(ctx)
	if err := d.keeper.Sweep(ctx); err != nil {
		d.cfg.Log.Warn("sweep ended runs", "error", err)
	}
	if err := d.capturer.Sweep(ctx); err != nil {
		d.cfg.Log.Warn("sweep unreferenced layers", "error", err)
	}
	if err := d.memory.Evict(ctx); err != nil {
		d.cfg.Log.Warn("evict memory files", "error", err)
	}
	d.sweepDisks(ctx)
	d.tend(ctx)
}

// sweepDisks removes the merged disks that nothing needs any more.
func (d *Daemon) sweepDisks(ctx context.Context) {
	if err := d.chains.Sweep(ctx, d.keeper); err != nil {
		d.cfg.Log.Warn("sweep merged disks", "error", err)
	}
}

// tend lets all that works by itself look at what has changed.
func (d *Daemon) tend(ctx context.Context) {
	d.fillReserve()
	d.machines.Reap(ctx)
	d.pools.Refill(ctx)
	d.prover.Look()
	d.shortener.Look()
	if err := d.slumber.Refresh(ctx); err != nil {
		d.cfg.Log.Warn("look for idle machines", "error", err)
	}
	d.revive(ctx)
}

// ended is told of each run of a machine that has ended by itself.
func (d *Daemon) ended(string) {
	ctx, cancel := context.WithTimeout(context.Background(), admission.QuickDeadline)
	defer cancel()
	d.machines.Reap(ctx)
	d.revive(ctx)
}

func (d *Daemon) revive(ctx context.Context) {
	if err := d.reviver.Look(ctx); err != nil {
		d.cfg.Log.Warn("look for machines to start", "error", err)
	}
}

func (d *Daemon) fillReserve() {
	if err := d.reserve.Fill(); err != nil {
		d.cfg.Log.Warn("keep space back", "error", err)
	}
}
