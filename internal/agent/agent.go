//go:build linux

// Package agent is the process in the guest: it runs commands, carries files
// and connections, tells facts, and shuts the guest down, all at the host's
// word over the agent link. It serves and never asks; what it is asked has
// been admitted by the host. How a guest boots is the affair of
// cmd/holdpoint-agent; for tests the service also runs in an ordinary process
// with a folder as its world.
package agent

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/agent/codec"
	"github.com/holdpoint/holdpoint/internal/agent/command"
	"github.com/holdpoint/holdpoint/internal/agent/console"
	"github.com/holdpoint/holdpoint/internal/agent/conversation"
	"github.com/holdpoint/holdpoint/internal/agent/freeze"
	"github.com/holdpoint/holdpoint/internal/agent/identity"
	"github.com/holdpoint/holdpoint/internal/agent/oom"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// maxMessage bounds one message from the host, in bytes.
const maxMessage = 4 << 20

// Config says what the agent serves.
type Config struct {
	// Build is what Ping tells.
	Build string
	// World is the machine's root; empty is "/". With another folder
	// absolute paths are looked up below it, relative ones and commands
	// without a folder start in it.
	World string
	// Init says that this process is process 1 of a guest, or has been: it reaps orphans,
	// sets host name, clock and mounts, and owns all processes and file
	// systems. Without it only what is below World and the agent's own
	// commands are touched.
	Init bool
	// System is process 1 beside this one, in a guest that belongs to the init of
	// its own disk; nil without. With it, orphans are that one's.
	System System
	// Refusal is why the guest cannot be what it was booted for; Configure answers
	// it. nil for none.
	Refusal error
	// Shield is this process's, so that commands start without it; nil for none.
	Shield *oom.Shield
	// Path is the default PATH of commands; empty for the usual one.
	Path string
	// Continued makes the agent begin as one that was told this by Configure
	// earlier, in the memory of a machine that now goes on; nothing of it is
	// carried out again. nil for one that has booted.
	Continued *agentv1.ConfigureRequest
	// PowerOff is called once, after Shutdown has been answered.
	PowerOff func()
	// Console gets what the on-boot command prints; nil discards it.
	Console io.Writer
	// Log gets what the agent has to say; nil discards it.
	Log *slog.Logger
}

// System is the init of the guest's own disk, see package system.
type System interface {
	// Start makes it process 1; it runs the program once it is up, nil for none.
	Start(onBoot *command.Spec) error
	// AwaitReady waits until it takes orders.
	AwaitReady(ctx context.Context) error
	// Stop has it end everything but this process, which then powers off, or lets
	// it do so by Release.
	Stop(ctx context.Context) error
	Release()
}

// Agent is the service. Its life: New; Configure is called over the link and
// commands are accepted from then on; where the guest goes on from a full
// checkpoint, Continue is called over a new conversation; Shutdown is called
// over the link and PowerOff called; Close.
type Agent struct {
	agentv1connect.UnimplementedAgentServiceHandler

	cfg      Config
	bootID   string
	family   *command.Family
	commands *command.Set
	streams  sync.WaitGroup // readers of requests that outlive their handlers

	off sync.Once

	clock      *identity.Clock
	freezer    *freeze.Freezer
	continuing sync.Mutex // held by Continue

	mu         sync.Mutex
	configured *agentv1.ConfigureRequest
	stopping   bool
	answered   bool // Shutdown has been answered, or is about to be
	onBoot     sync.WaitGroup
}

// New returns an agent that is not configured yet, unless cfg says otherwise.
func New(cfg Config) (*Agent, error) {
	if cfg.World == "" {
		cfg.World = "/"
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Console == nil {
		cfg.Console = io.Discard
	}
	bootID := rand.Text()
	if cfg.Init {
		b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			return nil, fmt.Errorf("read boot id: %w", err)
		}
		bootID = strings.TrimSpace(string(b))
	}
	codec.Prepare()
	family := command.NewFamily(cfg.Init && cfg.System == nil, cfg.Shield)
	commands := command.NewSet(command.Config{Family: family, World: cfg.World, Path: cfg.Path})
	if cfg.Init && cfg.System == nil {
		go console.Attend(console.Config{Commands: commands, Log: cfg.Log}) // as long as the guest runs
	}
	frozen := freeze.Config{Hooks: freeze.HooksIn(filepath.Join(cfg.World, freeze.HooksDir), commands.Output)}
	if cfg.Init {
		frozen.FileSystems = freeze.Mounted
	}
	return &Agent{
		cfg: cfg, bootID: bootID, family: family, configured: cfg.Continued, clock: identity.NewClock(cfg.Init), commands: commands,
		freezer: freeze.New(frozen),
	}, nil
}

// Freeze holds back what is written to the guest's file systems.
func (a *Agent) Freeze(ctx context.Context, stream *freeze.Stream) error {
	return wire.Encode(a.freezer.Serve(ctx, stream))
}

// Close hangs up all commands and waits for them.
func (a *Agent) Close() {
	for _, c := range a.commands.List() {
		c.HangUp()
	}
	a.commands.Wait()
	a.streams.Wait()
	a.onBoot.Wait()
	a.family.Close()
}

// Serve serves in each conversation that l yields, until ctx ends or l fails,
// and closes l. Then nobody can come back to the commands, and those that are
// not detached are hung up.
func (a *Agent) Serve(ctx context.Context, l net.Listener, opts ...connect.HandlerOption) error {
	mux := http.NewServeMux()
	mux.Handle(a.Handler(opts...))
	err := link.Serve(ctx, conversation.Listen(l), link.ServeConfig{Handler: mux, Log: a.cfg.Log})
	for _, c := range a.commands.List() {
		if !c.Detached {
			c.HangUp()
		}
	}
	return err
}

// Handler is the service and the path it is served at.
func (a *Agent) Handler(opts ...connect.HandlerOption) (string, http.Handler) {
	path, h := agentv1connect.NewAgentServiceHandler(a, append([]connect.HandlerOption{
		// The link is local: compressing costs more than it saves.
		connect.WithCompression("gzip", nil, nil),
		connect.WithCodec(codec.Codec{}),
		connect.WithReadMaxBytes(maxMessage),
	}, opts...)...)
	return path, withBulk(h)
}

// Ping answers at once. After the answer to Shutdown it says that the host has
// that answer.
func (a *Agent) Ping(context.Context, *connect.Request[agentv1.PingRequest]) (*connect.Response[agentv1.PingResponse], error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return nil, wire.Encode(os.NewSyscallError("clock_gettime", err))
	}
	a.heard()
	a.mu.Lock()
	defer a.mu.Unlock()
	return connect.NewResponse(&agentv1.PingResponse{
		BootId: a.bootID, UnixNano: a.clock.Now().UnixNano(), Build: a.cfg.Build,
		Configured: a.configured != nil, UptimeNano: now.Nano(),
	}), nil
}

// ready refuses work before the guest knows who it is and when it goes down.
func (a *Agent) ready() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.stopping:
		return errdefs.New(errdefs.WrongState, "the machine is shutting down")
	case a.configured == nil:
		return errdefs.New(errdefs.WrongState, "the machine is still booting; try again")
	}
	return nil
}

// path is where the user's path is. A slash or "/." at its end is kept, they
// have a meaning for cp.
func (a *Agent) path(name string) (string, error) {
	if name == "" || strings.ContainsRune(name, 0) {
		return "", errdefs.New(errdefs.Invalid, "path %q: use a path in the machine", name)
	}
	if !path.IsAbs(name) && a.cfg.World == "/" {
		name = path.Join("/root") + "/" + name
	}
	if a.cfg.World == "/" {
		return name, nil
	}
	suffix := ""
	if strings.HasSuffix(name, "/.") || name == "." {
		suffix = "/."
	} else if strings.HasSuffix(name, "/") {
		suffix = "/"
	}
	return filepath.Join(a.cfg.World, path.Clean("/"+name)) + suffix, nil
}

// heard powers off if Shutdown has been answered: the host has heard it. That
// the answer was written would not be enough, for the hypervisor's buffers end
// with the machine.
func (a *Agent) heard() {
	a.mu.Lock()
	answered := a.answered
	a.mu.Unlock()
	if answered && a.cfg.PowerOff != nil {
		a.off.Do(a.cfg.PowerOff)
	}
}
