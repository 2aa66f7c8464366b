// Command holdpoint-agent is the first process of a guest. It boots the guest
// from an initramfs: loads modules, mounts the root disk, makes it the root,
// and then serves the agent service (internal/agent) over the agent link until
// it powers the machine off. It lives in memory, never on the root disk: a
// frozen disk must not freeze it. It is no service manager; the one thing it
// starts by itself is the machine's on-boot command. In a guest that is to have
// the init of its own disk it serves beside that one (internal/agent/system).
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/agent"
	"github.com/holdpoint/holdpoint/internal/agent/system"
	"github.com/holdpoint/holdpoint/internal/link"
)

func main() {
	part := run
	switch {
	case os.Getpid() == 1 && os.Args[0] == system.LeaveName:
		part = leave
	case os.Getpid() == 1:
	case os.Args[0] == system.BesideName:
		part = beside
	default:
		fmt.Fprintln(os.Stderr, "holdpoint-agent: it is the first process of a holdpoint machine and runs as nothing else")
		os.Exit(2)
	}
	ignoreSignals()
	defer func() {
		// A panic elsewhere ends process 1, and the kernel reports that.
		if r := recover(); r != nil {
			fmt.Fprintf(os.Stderr, "holdpoint-agent: panic: %v\n%s", r, debug.Stack())
			powerOff()
		}
	}()
	if err := part(); err != nil {
		fmt.Fprintf(os.Stderr, "holdpoint-agent: %v\n", err)
	}
	powerOff()
}

func run() error {
	b := &boot{begun: time.Now()}
	params, err := b.prepare()
	if err != nil {
		return err
	}
	log := newLog(os.Stderr)
	b.log = log
	port, err := b.devices(params.Root)
	if err != nil {
		return err
	}
	if err := b.root(params.Root); err != nil {
		return err
	}
	cfg := agent.Config{Build: build(), Init: true, PowerOff: powerOff, Console: os.Stderr, Log: log}
	if params.System {
		if cfg.Refusal = system.Find(); cfg.Refusal == nil {
			log.Info("holdpoint-agent hands over to the disk's init", "booted_in", time.Since(b.begun).Round(time.Millisecond), "phases", b.phases())
			return system.Begin()
		}
	}
	b.finish()
	log.Info("holdpoint-agent is ready", "booted_in", time.Since(b.begun).Round(time.Millisecond), "phases", b.phases())
	return serve(cfg, port, params.Magic)
}

func serve(cfg agent.Config, port string, magic link.Magic) error {
	p, err := link.OpenPort(port)
	if err != nil {
		return err
	}
	a, err := agent.New(cfg)
	if err != nil {
		return err
	}
	return a.Serve(context.Background(), link.NewGuest(p, magic))
}

func newLog(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{ReplaceAttr: dropTime}))
}

// build is the version control revision the binary was built from.
func build() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	revision, modified := info.Main.Version, ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			modified = "+dirty"
		}
	}
	return revision + modified
}

func dropTime(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return a
}

// ignoreSignals makes every signal harmless that can be: the end of process 1
// is the end of the guest. They are received and dropped, because ignored ones
// would stay ignored in the commands.
func ignoreSignals() {
	signal.Notify(make(chan os.Signal, 1),
		unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGPWR, unix.SIGPIPE, unix.SIGALRM,
		unix.SIGUSR1, unix.SIGUSR2, unix.SIGABRT, unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU)
	// Ctrl-Alt-Del then only sends SIGINT.
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF)
}

func powerOff() {
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	// Only without the right to do so is this reached.
	panic("holdpoint-agent: the machine cannot be powered off")
}
