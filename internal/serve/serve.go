//go:build linux

// Package serve assembles the processes of a home from their parts: the daemon
// with its doors, and the monitor of a run. It holds no policy; what differs
// between real machines and fake ones is handed to it.
package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	sdnotify "github.com/coreos/go-systemd/v22/daemon"

	"github.com/holdpoint/holdpoint/internal/accesslog"
	"github.com/holdpoint/holdpoint/internal/daemon"
	"github.com/holdpoint/holdpoint/internal/daemon/proof"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/gate/proxy"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor/process"
)

// closeTimeout is how long running operations get to end when the daemon
// stops; what needs longer is settled at the next start.
const closeTimeout = 10 * time.Second

// The environment of the daemon that changes what it does by itself:
// HOLDPOINT_VERIFY is "off" or "now" (see proof.Config.When), and
// HOLDPOINT_FIRST_BOOTS "off" makes every new machine boot.
const (
	verifyVariable     = "HOLDPOINT_VERIFY"
	firstBootsVariable = "HOLDPOINT_FIRST_BOOTS"
)

// checkEnvironment refuses (INVALID) values that mean nothing.
func checkEnvironment() error {
	for _, v := range []struct {
		name    string
		allowed []string
	}{
		{verifyVariable, []string{proof.Now, proof.Off}},
		{firstBootsVariable, []string{"on", "off"}},
	} {
		if value := os.Getenv(v.name); value != "" && !slices.Contains(v.allowed, value) {
			return errdefs.New(errdefs.Invalid, "start daemon: %s is %q: set it to %s, or unset it", v.name, value, strings.Join(v.allowed, " or "))
		}
	}
	return nil
}

// softMemory is the daemon's soft limit of memory in bytes; it idles far below.
const softMemory = 96 << 20

// DaemonConfig is what a daemon's process is made of.
type DaemonConfig struct {
	Home *home.Home
	Host daemon.Host
	// MonitorCommand is the hidden verb's program and first arguments; the
	// folder of a run is added.
	MonitorCommand []string
	Build          string
	// Ready is called once, when the daemon listens.
	Ready func()
	Log   io.Writer
	// Files is the door to the disk; nil is the usual one.
	Files *durable.FS
}

// Daemon runs the daemon of a home until ctx ends or it is told to stop.
// Machines run on.
func Daemon(ctx context.Context, cfg DaemonConfig) (err error) {
	debug.SetMemoryLimit(softMemory)
	debug.SetGCPercent(50)
	log := slog.New(slog.NewTextHandler(cfg.Log, nil))
	if err := checkEnvironment(); err != nil {
		return err
	}
	d, err := daemon.Open(ctx, daemon.Config{
		Home: cfg.Home, Files: cfg.Files, Host: cfg.Host, MonitorCommand: cfg.MonitorCommand, Build: cfg.Build, Log: log,
		Verify: os.Getenv(verifyVariable), NoFirstBoots: os.Getenv(firstBootsVariable) == "off",
	})
	if err != nil {
		return err
	}
	if why, fix := cfg.Home.Unfit(); why != "" {
		log.Warn(why + "; " + fix)
	}
	defer func() {
		closing, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), closeTimeout, errors.New("they go on too long"))
		defer cancel()
		if closeErr := d.Close(closing); closeErr != nil {
			log.Warn("close the daemon", "error", closeErr)
		}
	}()
	door, err := startProxy(cfg, d, log)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if closeErr := door.Close(closing); closeErr != nil {
			log.Debug("close the proxy", "error", closeErr)
		}
	}()
	d.SetProxy(door)
	door.Settle(ctx)
	listener, err := d.Listen()
	if err != nil {
		return err
	}
	if _, err := sdnotify.SdNotify(false, sdnotify.SdNotifyReady); err != nil {
		log.Warn("notify the service manager", "error", err)
	}
	log.Info("serving", "socket", listener.Addr().String(), "proxy", door.Addr(), "build", cfg.Build)
	if cfg.Ready != nil {
		cfg.Ready()
	}
	defer func() { _, _ = sdnotify.SdNotify(false, sdnotify.SdNotifyStopping) }() // nobody waits for it
	return d.Serve(ctx, listener)
}

// startProxy starts the proxy on the port that the home's published URLs had
// before, as long as it is free.
func startProxy(cfg DaemonConfig, d *daemon.Daemon, log *slog.Logger) (*front, error) {
	path := cfg.Home.ProxyPort()
	remembered, _ := os.ReadFile(path)          // none yet, or nothing is lost
	port, _ := strconv.Atoi(string(remembered)) // 0 is the default
	if port < 0 || port > 65535 {
		port = 0
	}
	visits := accesslog.New(cfg.Home.AccessLogs())
	door, err := proxy.Start(proxy.Config{Backend: backend{d}, Visits: visits, Logger: log, Port: port})
	if err != nil {
		return nil, fmt.Errorf("start the proxy: %w", err)
	}
	_, now, err := net.SplitHostPort(door.Addr())
	if err == nil && now != string(remembered) {
		if port != 0 {
			log.Warn("the port of published URLs has changed", "was", port, "now", now)
		}
		err = cfg.Files.WriteFile(path, []byte(now), 0o600)
	}
	if err != nil {
		log.Warn("remember the port of the proxy", "error", err)
	}
	return &front{Proxy: door, daemon: d, visits: visits, log: log}, nil
}

// front is the proxy as the daemon sees it.
type front struct {
	*proxy.Proxy
	daemon *daemon.Daemon
	visits *accesslog.Log
	log    *slog.Logger
}

// Settle ends the proxy's connections into machines that no route leads to any
// more: a withdrawn or moved one, or one of an older generation. It listens for
// the TCP routes that there are, and drops the logs of machines that are gone.
func (f *front) Settle(ctx context.Context) {
	routes, machines, err := f.daemon.Published(ctx)
	if err != nil {
		f.log.Warn("look for what routes there are", "error", err)
		return
	}
	leads, ports := map[proxy.Target]bool{}, map[int]bool{}
	for _, r := range routes {
		leads[proxy.Target{MachineID: r.MachineID, Generation: r.Generation, Port: r.Port}] = true
		if listen := machine.ListenPort(r.Host); listen != 0 {
			ports[listen] = true
		}
	}
	f.Proxy.Settle(ports)
	f.Cut(func(t proxy.Target) bool {
		t.Machine = ""
		return !leads[t]
	})
	if err := f.visits.Keep(func(id string) bool { return machines[id] }); err != nil {
		f.log.Warn("remove the logs of routes", "error", err)
	}
}

// backend is the daemon as the proxy sees it.
type backend struct{ daemon *daemon.Daemon }

// Lookup gives the target of a published host name.
func (b backend) Lookup(ctx context.Context, host string) (proxy.Target, error) {
	route, m, err := b.daemon.Route(ctx, host)
	if err != nil {
		return proxy.Target{}, err
	}
	return proxy.Target{MachineID: m.ID, Generation: m.Generation, Port: route.Port, Machine: m.Name}, nil
}

// Dial connects to the target's port in its machine.
func (b backend) Dial(ctx context.Context, t proxy.Target) (net.Conn, error) {
	return b.daemon.DialPort(ctx, t.MachineID, t.Generation, t.Port)
}

// MonitorConfig is what a monitor's process is made of.
type MonitorConfig struct {
	Hypervisor machine.Hypervisor
	// HypervisorVersion is told in the status.
	HypervisorVersion string
	Build             string
	// Dir is the run's folder.
	Dir string
	// Files is the door to the disk; nil is the usual one.
	Files *durable.FS
}

// Monitor is the process that looks after one run. Its log is its standard error.
func Monitor(ctx context.Context, cfg MonitorConfig) error {
	return process.Run(ctx, process.Config{
		Dir: cfg.Dir, Hypervisor: cfg.Hypervisor, HypervisorVersion: cfg.HypervisorVersion, Files: cfg.Files,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Build: cfg.Build,
	})
}
