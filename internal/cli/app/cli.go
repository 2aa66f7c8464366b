// Package app is what the verbs of the command line share: the connection to
// the daemon, operations and their interruption, output, errors and exit
// codes. It knows no verb.
package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/launch"
	"github.com/holdpoint/holdpoint/internal/cli/terminal"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
)

// Config is what the command line is made with. Zero values of the streams,
// Args and Executable stand for the process's own.
type Config struct {
	// Version is the released version; "dev" when empty.
	Version string
	// RunDaemon runs a daemon until ctx ends. Nil where none can run.
	RunDaemon func(ctx context.Context, run DaemonRun) error
	// RunMonitor is the hidden verb that looks after one machine's run; args
	// are its own. Nil where none can run.
	RunMonitor func(ctx context.Context, args []string) error

	Args           []string
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// Executable is the program that is run for a daemon.
	Executable string
}

// DaemonRun is one run of a daemon.
type DaemonRun struct {
	Home *home.Home
	// Build is what its status says, for the command line to compare.
	Build string
	// Executable is this program, for monitors.
	Executable string
	// Ready is to be called, once, when the daemon listens.
	Ready func()
	// Log is where it logs.
	Log io.Writer
}

// New makes an App.
func New(cfg Config) *App {
	return &App{Config: withDefaults(cfg), verbs: map[*cobra.Command]Verb{}}
}

func withDefaults(cfg Config) Config {
	if cfg.Version == "" {
		cfg.Version = "dev"
	}
	if cfg.Args == nil {
		cfg.Args = os.Args[1:]
	}
	if cfg.Stdin == nil {
		cfg.Stdin = os.Stdin
	}
	if cfg.Stdout == nil {
		cfg.Stdout = os.Stdout
	}
	if cfg.Stderr == nil {
		cfg.Stderr = os.Stderr
	}
	return cfg
}

// App is one command line being run.
type App struct {
	Config Config
	verbs  map[*cobra.Command]Verb

	// The global flags.
	home  string
	JSON  bool
	Quiet bool
	// requestID is --request-id, of verbs that change something.
	requestID string

	mu sync.Mutex
	// bar is the progress that is shown now; nil for none.
	bar *terminal.Progress
}

// OpenHome is the home the flags name.
func (a *App) OpenHome() (*home.Home, error) {
	dir := a.home
	if dir == "" {
		var err error
		if dir, err = home.Default(); err != nil {
			return nil, err
		}
	}
	return home.Open(dir)
}

// Launcher finds, starts and replaces the daemon of the home.
func (a *App) Launcher() (*launch.Launcher, error) {
	h, err := a.OpenHome()
	if err != nil {
		return nil, err
	}
	cfg := launch.Config{Home: h, Build: launch.Build(a.Config.Version), Say: a.Say}
	if a.Config.RunDaemon != nil {
		executable, err := a.Executable()
		if err != nil {
			return nil, err
		}
		cfg.Command = []string{executable, "--home", h.Dir(), "daemon", "run"}
	}
	return launch.New(cfg), nil
}

// connect gives a client of a running daemon; the caller closes it.
func (a *App) connect(ctx context.Context) (*client.Client, error) {
	l, err := a.Launcher()
	if err != nil {
		return nil, err
	}
	return l.Connect(ctx)
}

// Executable is this program's absolute path, by the name it was called with
// if that leads to it.
func (a *App) Executable() (string, error) {
	if a.Config.Executable != "" {
		return a.Config.Executable, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find this program: %w", err)
	}
	called, err := exec.LookPath(os.Args[0])
	if err != nil {
		return self, nil
	}
	there, err1 := os.Stat(called)
	here, err2 := os.Stat(self)
	if err1 != nil || err2 != nil || !os.SameFile(there, here) {
		return self, nil
	}
	return filepath.Abs(called)
}

// With connects, and runs f with the client. Signals are f's to heed.
func (a *App) With(ctx context.Context, f func(c *client.Client) error) error {
	connecting, stop := Interruptible(ctx)
	c, err := a.connect(connecting)
	stop()
	if err != nil {
		return err
	}
	defer c.Close()
	return f(c)
}

// Query is With for calls that only ask: they end when we are asked to leave,
// and f is called once more when the daemon went away under it. f must not
// print before it has its answer.
func (a *App) Query(ctx context.Context, f func(ctx context.Context, c *client.Client) error) error {
	ctx, stop := Interruptible(ctx)
	defer stop()
	err := a.Once(ctx, f)
	if client.Unreachable(err) && ctx.Err() == nil {
		err = a.Once(ctx, f)
	}
	return err
}

// Once is Query for what must not be done a second time: it has an effect, or
// has printed a part.
func (a *App) Once(ctx context.Context, f func(ctx context.Context, c *client.Client) error) error {
	ctx, stop := Interruptible(ctx)
	defer stop()
	c, err := a.connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	return f(ctx, c)
}

// Say tells a person something on the side.
func (a *App) Say(message string) {
	if a.Quiet {
		return
	}
	line := "holdpoint: " + view.Line(message)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.bar != nil {
		a.bar.Print(line)
		return
	}
	fmt.Fprintln(a.Config.Stderr, line)
}

// Note says every line of notes.
func (a *App) Note(notes []string) {
	for _, n := range notes {
		a.Say(n)
	}
}

// Interactive reports whether a person can be asked.
func (a *App) Interactive() bool { return terminal.Is(a.Config.Stdin) && terminal.Is(a.Config.Stderr) }

// Ask puts a yes-or-no question; the answer is no unless it begins with y.
func (a *App) Ask(question string) (bool, error) {
	answer, err := terminal.Ask(a.Config.Stdin, a.Config.Stderr, question+" [y/N]")
	return strings.HasPrefix(answer, "y"), err
}

// Output is what a verb prints: one JSON object, or a few words with --quiet,
// or text for people.
type Output struct {
	Object any
	Terse  []string
	// Human may be nil, for nothing.
	Human func(w io.Writer) error
}

// Print writes a verb's output: the object with --json, else what people read.
func (a *App) Print(o Output) error {
	if a.JSON {
		return a.PrintJSON(o.Object)
	}
	if a.Quiet {
		for _, line := range o.Terse {
			if _, err := fmt.Fprintln(a.Config.Stdout, view.Line(line)); err != nil {
				return err
			}
		}
		return nil
	}
	if o.Human == nil {
		return nil
	}
	return o.Human(a.Config.Stdout)
}

// PrintJSON writes one object to the standard output.
func (a *App) PrintJSON(object any) error {
	e := json.NewEncoder(a.Config.Stdout)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(object)
}

// Report prints the error, if any, and gives the exit code.
func (a *App) Report(cmd *cobra.Command, err error) int {
	if err == nil {
		return 0
	}
	var passed Exit
	if errors.As(err, &passed) {
		return passed.Code
	}
	kind, message := client.KindOf(err), view.Line(err.Error())
	if errors.Is(err, context.Canceled) && kind == errdefs.Interrupted {
		message = "interrupted"
	}
	fmt.Fprintf(a.Config.Stderr, "holdpoint: %s\n", message)
	if a.wantsJSON() {
		// The line is out already; a broken stdout changes nothing.
		_ = a.PrintJSON(view.Failure{Header: view.NewHeader(), Error: view.Error{Kind: string(kind), Message: message}})
	}
	v := a.verbs[cmd]
	if kind != errdefs.Interrupted && (v.PassesCode || v.PassesCodeOf && slices.Contains(a.Config.Args, "--")) {
		return ExitOwn
	}
	return ExitCode(kind)
}

// wantsJSON also finds --json where flags could not be parsed.
func (a *App) wantsJSON() bool {
	ours, _, _ := strings.Cut(strings.Join(a.Config.Args, "\x00"), "\x00--\x00")
	return a.JSON || slices.Contains(strings.Split(ours, "\x00"), "--json")
}
