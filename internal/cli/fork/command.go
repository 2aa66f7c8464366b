package fork

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/guest"
	"github.com/holdpoint/holdpoint/internal/cli/terminal"
	"github.com/holdpoint/holdpoint/internal/cli/view"
)

// maxKept is how much of each of a command's outputs --json carries, in bytes:
// there may be 256 commands, and all of it is in memory.
const maxKept = 1 << 20

// run runs the command in every machine there is, and waits for all.
func (r *report) run(ctx context.Context, c *client.Client, detach bool) error {
	console := newConsole(r)
	var commands []*guest.Exec
	var running sync.WaitGroup
	var ends []func(context.Context)
	for i := range r.children {
		child := &r.children[i]
		if child.fork.GetError() != nil {
			continue
		}
		name := child.fork.GetMachine().GetName()
		e := &guest.Exec{
			Verb: "fork", Machine: name,
			Start: &agentv1.ExecStart{
				Argv: r.argv, Env: []string{fmt.Sprintf("FORK_INDEX=%d", child.fork.GetIndex())}, Detach: detach,
			},
			Waiting: func(why string) { r.app.Say(fail(name, "waiting: "+why)) },
		}
		flush := console.attach(child, e)
		commands = append(commands, e)
		ends = append(ends, func(ctx context.Context) {
			result, err := e.Run(ctx, c)
			child.ran, child.result, child.err = true, result, err
			flush()
		})
	}
	stop := passSignals(commands)
	defer stop()
	for _, end := range ends {
		running.Go(func() { end(ctx) })
	}
	running.Wait()
	return console.err
}

// passSignals gives every command the signals of this process until stop.
func passSignals(commands []*guest.Exec) (stop func()) {
	signals := make(chan os.Signal, 16)
	to := make([]chan os.Signal, len(commands))
	for i, e := range commands {
		to[i] = make(chan os.Signal, 16)
		e.Signals = to[i]
	}
	done := make(chan struct{})
	var worker sync.WaitGroup
	signal.Notify(signals, terminal.Forwarded()...)
	worker.Go(func() {
		for {
			select {
			case <-done:
				return
			case s := <-signals:
				for _, c := range to {
					select {
					case c <- s:
					default: // it has enough of them
					}
				}
			}
		}
	})
	return func() {
		signal.Stop(signals)
		close(done)
		worker.Wait()
	}
}

// console puts the output of many commands on one screen, line by line.
type console struct {
	report *report
	width  int

	mu             sync.Mutex
	stdout, stderr io.Writer
	// err is the first failure to write.
	err error
}

func newConsole(r *report) *console {
	c := &console{report: r, stdout: r.app.Config.Stdout, stderr: r.app.Config.Stderr}
	if terminal.Is(c.stdout) {
		c.stdout = view.Harmless(c.stdout)
	}
	if terminal.Is(c.stderr) {
		c.stderr = view.Harmless(c.stderr)
	}
	for i := range r.children {
		c.width = max(c.width, len(r.children[i].fork.GetName()))
	}
	return c
}

// attach decides where a command's output goes; flush ends its last lines.
func (c *console) attach(child *child, e *guest.Exec) (flush func()) {
	if c.report.app.JSON {
		child.stdout, child.stderr = &guest.Kept{Limit: maxKept}, &guest.Kept{Limit: maxKept}
		e.Stdout, e.Stderr = child.stdout, child.stderr
		return func() {}
	}
	prefix := fmt.Sprintf("%-*s | ", c.width, child.fork.GetName())
	stdout, stderr := &lines{console: c, to: c.stdout, prefix: prefix}, &lines{console: c, to: c.stderr, prefix: prefix}
	e.Stdout, e.Stderr = stdout, stderr
	return func() {
		stdout.flush()
		stderr.flush()
	}
}

// maxLine is the longest line that is kept together, in bytes.
const maxLine = 64 << 10

// lines writes whole lines, each with a prefix.
type lines struct {
	console *console
	to      io.Writer
	prefix  string
	rest    []byte
}

// Write passes on the lines that have ended.
func (l *lines) Write(p []byte) (int, error) {
	for _, b := range p {
		if b != '\n' {
			l.rest = append(l.rest, b)
		}
		if b == '\n' || len(l.rest) >= maxLine {
			if err := l.line(); err != nil {
				return 0, err
			}
		}
	}
	return len(p), nil
}

func (l *lines) line() error {
	text := make([]byte, 0, len(l.prefix)+len(l.rest)+1)
	text = append(append(append(text, l.prefix...), l.rest...), '\n')
	l.rest = l.rest[:0]
	l.console.mu.Lock()
	defer l.console.mu.Unlock()
	_, err := l.to.Write(text)
	if err != nil && l.console.err == nil {
		l.console.err = fmt.Errorf("write the commands' output: %w", err)
	}
	return err
}

// flush writes what has no end of line.
func (l *lines) flush() {
	if len(l.rest) > 0 {
		_ = l.line() // the console keeps the error
	}
}
