//go:build linux

// Command bench measures holdpoint on real guests and prints one table: each
// number that has a target is a ratio of two things measured in turns in the
// same run. It is no test: it fails only when something cannot be measured.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"

	"github.com/holdpoint/holdpoint/bench/full"
	"github.com/holdpoint/holdpoint/bench/stage"
	"github.com/holdpoint/holdpoint/bench/table"
)

// options are the flags.
type options struct {
	bin, template, write string
	only                 *regexp.Regexp
	rounds               int
}

func main() {
	var o options
	var only string
	flag.StringVar(&o.bin, "holdpoint", "bin/holdpoint", "the binary to measure")
	flag.StringVar(&o.template, "template", os.Getenv("HOLDPOINT_TEST_HOME"), "a home with the image `debian`, which is copied")
	flag.StringVar(&only, "only", ".", "measure only what matches this pattern: cli, exec, cp, checkpoint, frozen, raw-copy, proxy, boot, idle, import, network, full-downtime, full-restore, full-fork, full-stored, full-speed")
	flag.IntVar(&o.rounds, "rounds", 20, "rounds of each figure of the full- groups, after a warm-up")
	flag.StringVar(&o.write, "write", "", "put the table between the bench:begin and bench:end marks of this file, too")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if o.only, err = regexp.Compile(only); err == nil {
		err = run(ctx, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// measurement is one group of rows.
type measurement struct {
	name string
	run  func(ctx context.Context, s *stage.Stage, t *table.Table) error
}

// full makes a measurement of one of package full's.
func (o options) full(measure func(*full.Bench, context.Context) error) func(context.Context, *stage.Stage, *table.Table) error {
	return func(ctx context.Context, s *stage.Stage, t *table.Table) error {
		b, err := full.New(ctx, s, t, o.rounds)
		if err != nil {
			return err
		}
		return measure(b, ctx)
	}
}

func run(ctx context.Context, o options) (err error) {
	bin, err := filepath.Abs(o.bin)
	if err != nil {
		return err
	}
	if o.template == "" {
		return errors.New("no home with an image: run make image and set HOLDPOINT_TEST_HOME as it says")
	}
	s, err := stage.New(ctx, bin, o.template, os.Stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close(ctx)) }()
	t := &table.Table{Log: os.Stderr}
	for _, m := range []measurement{
		{"boot", measureBoot},
		{"idle", measureIdle},
		{"cli", measureCLI},
		{"exec", measureExec},
		{"cp", measureCopy},
		{"proxy", measureProxy},
		{"checkpoint", measureCheckpoint},
		{"frozen", o.measureFrozen},
		{"raw-copy", measureRawCopy},
		{"network", o.full((*full.Bench).Network)},
		{"import", measureImport},
		{"full-downtime", o.full((*full.Bench).Downtime)},
		{"full-restore", o.full((*full.Bench).Restore)},
		{"full-fork", o.full((*full.Bench).Fork)},
		{"full-stored", o.full((*full.Bench).Stored)},
		{"full-speed", o.full((*full.Bench).Speed)},
	} {
		if !o.only.MatchString(m.name) {
			continue
		}
		fmt.Fprintf(os.Stderr, "measuring %s …\n", m.name)
		if err := m.run(ctx, s, t); err != nil {
			return fmt.Errorf("measure %s: %w", m.name, err)
		}
	}
	if t.Stamp, err = stamp(ctx, s); err != nil {
		return err
	}
	if err := t.Write(os.Stdout); err != nil || o.write == "" {
		return err
	}
	return replaceTable(o.write, t)
}

// stamp says what was measured, where.
func stamp(ctx context.Context, s *stage.Stage) ([]string, error) {
	commit, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty").Output()
	if err != nil {
		commit = []byte("unknown")
	}
	var uts syscall.Utsname
	if err := syscall.Uname(&uts); err != nil {
		return nil, err
	}
	var kernel []byte
	for _, c := range uts.Release {
		if c == 0 {
			break
		}
		kernel = append(kernel, byte(c))
	}
	m, err := s.Shared(ctx)
	if err != nil {
		return nil, err
	}
	return []string{
		"commit " + strings.TrimSpace(string(commit)), "QEMU " + m.GetQemuVersion(), "host Linux " + string(kernel),
		"accelerator " + m.GetAccelerator(), fmt.Sprintf("%d cores", runtime.NumCPU()),
	}, nil
}

// replaceTable puts the table between the marks of a document.
func replaceTable(path string, t *table.Table) error {
	doc, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, ok := bytes.Cut(doc, []byte("<!-- bench:begin -->\n"))
	_, after, ok2 := bytes.Cut(rest, []byte("<!-- bench:end -->"))
	if !ok || !ok2 {
		return fmt.Errorf("%s has no bench:begin and bench:end marks", path)
	}
	var out bytes.Buffer
	out.Write(before)
	_, _ = io.WriteString(&out, "<!-- bench:begin -->\n")
	if err := t.Write(&out); err != nil {
		return err
	}
	_, _ = io.WriteString(&out, "<!-- bench:end -->")
	out.Write(after)
	return os.WriteFile(path, out.Bytes(), 0o644)
}
