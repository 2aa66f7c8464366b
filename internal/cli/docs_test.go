package cli_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/holdpoint/holdpoint/internal/cli"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// TestDocs holds docs/cli.md to the commands; -update writes it anew.
func TestDocs(t *testing.T) {
	root, verbOf := commands()
	d := &docs{verbOf: verbOf, objects: map[string]reflect.Type{}}
	got := d.page(root)
	path := filepath.Join("..", "..", "docs", "cli.md")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("docs/cli.md is stale; write it with `go test ./internal/cli -run TestDocs -update`:\n%s", diff)
	}
}

func commands() (*cobra.Command, func(*cobra.Command) (app.Verb, bool)) {
	return cli.Commands(cli.Config{
		RunDaemon:  func(context.Context, cli.DaemonRun) error { return nil },
		RunMonitor: func(context.Context, []string) error { return nil },
	})
}

// Every verb says what it does, has JSON unless it cannot, and knows only
// kinds there are.
func TestVerbsAreComplete(t *testing.T) {
	root, verbOf := commands()
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
		v, ok := verbOf(cmd)
		if !ok || v.Hidden {
			return
		}
		if v.Short == "" || strings.HasSuffix(v.Short, ".") {
			t.Errorf("%s: short text %q", cmd.CommandPath(), v.Short)
		}
		noJSON := []string{"holdpoint shell", "holdpoint console", "holdpoint completion", "holdpoint daemon run"}
		if v.Object == nil != slices.Contains(noJSON, cmd.CommandPath()) {
			t.Errorf("%s: JSON object %T", cmd.CommandPath(), v.Object)
		}
		for _, k := range v.Kinds {
			if k != errdefs.Internal && app.ExitCode(k) == 1 {
				t.Errorf("%s: kind %s has no exit code", cmd.CommandPath(), k)
			}
		}
	}
	walk(root)
}

// docs writes the page.
type docs struct {
	strings.Builder
	verbOf func(*cobra.Command) (app.Verb, bool)
	// objects are the JSON objects met so far, and order theirs.
	objects map[string]reflect.Type
	order   []string
}

const docsHead = `<!-- Written by go test ./internal/cli -run TestDocs -update; do not edit. -->

# The command line

%s

Where a verb takes a machine, an image or a checkpoint, an exact name, an id, an
unambiguous beginning of either, or "last" will do: the one used last, which an
automatic checkpoint never is. Names are made of a–z, 0–9 and "-", begin with a
letter or digit, and have at most 63.

Every verb takes:

%s
- **The daemon** is started by the first verb that needs it, and replaced when it
  is of another build; a line on stderr says so, and machines run on. Every verb
  needs it but "version", "completion", "help", "daemon status" and "daemon stop",
  which never start one, as completing in a shell never does.
- **Published host names** are served at port 7780, or at the next free one where
  another program has it; a home remembers its port. "expose", "routes" and "daemon
  status" say it.
- **Kinds**: a checkpoint is full (disk, memory and CPU of a running machine) or
  of the disk alone, frozen (while its file systems refused writes) or stopped. A
  kind is never replaced by another unasked: what cannot be done is refused with
  UNSUPPORTED, exit code 6, such as all but stopped ones of a raw disk.
- **stdout** has what was asked for and nothing else. Diagnostics, progress (on a
  terminal only) and questions are on stderr. Emphasis is for terminals only;
  NO_COLOR turns it off.
- **Errors** are one line on stderr, "holdpoint: what, which, and what to do",
  and an exit code.
- **--json** prints one object on stdout, with "schema_version". When a verb fails
  the line is on stderr all the same, and stdout has
  {"schema_version": 1, "error": {"kind": …, "message": …}}. "help", "completion",
  "shell", "console" and "daemon run" have no object for what they do, and print
  the same with it. New fields may come; a change that breaks readers raises
  schema_version. Times are RFC 3339 in UTC, empty for none; sizes are bytes; names
  ending in _ms are milliseconds.
- **--request-id** makes a verb safe to repeat: the same id with the same options
  gives the first result again, with others REQUEST_ID_CONFLICT.
- **Ctrl-C** during run, image build, checkpoint create and restore cancels the
  operation and waits until it is undone; a second one leaves at once. During the
  other verbs it ends the wait only, as SIGTERM and SIGHUP always do: the
  operation goes on, and the line printed says how to watch or cancel it.

## Environment

| variable | meaning |
|---|---|
| HOLDPOINT_HOME | the folder with all state, unless --home says otherwise |
| HOLDPOINT_ACCEL | "kvm" or "tcg": what guests run on. Empty: KVM where a kernel was seen to boot with it, else emulation (TCG); "doctor" says which, and why |
| HOLDPOINT_VERIFY | "now": every new full checkpoint is verified at once, and not only when the host has little to do; "off": only by "checkpoint verify" |
| HOLDPOINT_FIRST_BOOTS | "off": every new machine boots, as with "run --boot", and no image's first boot is kept for the next machine |
| NO_COLOR | anything: no emphasis on a terminal |

The daemon reads its own when it starts, from whatever starts it: a verb or a
service manager. After a change, "holdpoint daemon stop" makes the next verb start
one that has it; machines run on.

## Exit codes

| code | kind of error |
|---|---|
| 0 | none |
`

func (d *docs) page(root *cobra.Command) string {
	fmt.Fprintf(d, docsHead, root.Long, flagList(root.PersistentFlags()))
	byCode := map[int][]string{}
	for _, k := range kinds() {
		byCode[app.ExitCode(k)] = append(byCode[app.ExitCode(k)], string(k))
	}
	for code := range 131 {
		if code == 125 {
			d.WriteString("| 125 | any other than INTERRUPTED, in exec, shell, attach, and fork with a command, which otherwise exit with the code of the command |\n")
		} else if names := byCode[code]; len(names) > 0 {
			fmt.Fprintf(d, "| %d | %s |\n", code, strings.Join(names, ", "))
		}
	}
	d.WriteString("\n## Verbs\n")
	d.walk(root)
	d.WriteString("\n## JSON objects\n")
	for i := 0; i < len(d.order); i++ { // objects name further ones
		fmt.Fprintf(d, "\n### %s\n\n", d.order[i])
		d.fields(d.objects[d.order[i]])
	}
	return d.String()
}

func kinds() []errdefs.Kind {
	return []errdefs.Kind{
		errdefs.Internal, errdefs.Invalid, errdefs.NotFound, errdefs.AlreadyExists, errdefs.Conflict, errdefs.RequestIDConflict,
		errdefs.MachineBusy, errdefs.WrongState, errdefs.Unsupported, errdefs.KindMismatch, errdefs.Incompatible, errdefs.Referenced,
		errdefs.OutcomeUnknown, errdefs.NoSpace, errdefs.Storage, errdefs.Deadline, errdefs.Denied, errdefs.Interrupted,
	}
}

func (d *docs) walk(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		v, ok := d.verbOf(sub)
		if ok && !v.Hidden {
			d.verb(sub, v)
		}
		d.walk(sub)
	}
}

func (d *docs) verb(cmd *cobra.Command, v app.Verb) {
	fmt.Fprintf(d, "\n### %s\n\n    %s\n\n", cmd.CommandPath(), cmd.UseLine())
	text := v.Long
	if text == "" {
		text = v.Short + "."
	}
	if strings.Contains(text, "\n  ") {
		text = "```\n" + text + "\n```" // has columns
	}
	d.WriteString(text + "\n")
	if v.Example != "" {
		fmt.Fprintf(d, "\n```\n%s\n```\n", v.Example)
	}
	if flags := flagList(cmd.LocalNonPersistentFlags()); flags != "" {
		d.WriteString("\n" + flags)
	}
	exits := v.Exits()
	for i, line := range exits {
		code, meaning, _ := strings.Cut(strings.TrimSpace(line), "  ")
		exits[i] = code + " " + strings.ReplaceAll(meaning, ", ", " or ")
	}
	fmt.Fprintf(d, "\nExit codes: %s.\n", strings.Join(exits, ", "))
	if v.Object != nil {
		d.WriteString("\nJSON:\n\n")
		d.fields(reflect.TypeOf(v.Object))
	}
	if v.PlanObject != nil {
		d.WriteString("\nJSON with --plan:\n\n")
		d.fields(reflect.TypeOf(v.PlanObject))
	}
}

func flagList(flags *pflag.FlagSet) string {
	var b strings.Builder
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" {
			return
		}
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if kind := f.Value.Type(); kind != "bool" {
			name += " " + kind
		}
		fmt.Fprintf(&b, "- `%s`: %s%s\n", name, f.Usage, defaultOf(f))
	})
	return b.String()
}

// defaultOf is the default of a flag whose text does not say it.
func defaultOf(f *pflag.Flag) string {
	if slices.Contains([]string{"", "0", "0s", "false", "[]"}, f.DefValue) {
		return ""
	}
	return " (default " + f.DefValue + ")"
}

// fields lists the fields of an object.
func (d *docs) fields(t reflect.Type) {
	for i := range t.NumField() {
		f := t.Field(i)
		if f.Anonymous {
			d.fields(f.Type)
			continue
		}
		fmt.Fprintf(d, "- `%s`: %s", f.Tag.Get("json"), d.kind(f.Type))
		if text := f.Tag.Get("doc"); text != "" {
			d.WriteString("; " + text)
		}
		d.WriteString("\n")
	}
}

func (d *docs) kind(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Slice:
		if t == reflect.TypeFor[json.RawMessage]() {
			return "object, or null"
		}
		return "list of " + d.kind(t.Elem())
	case reflect.Pointer:
		return d.kind(t.Elem()) + ", or null"
	case reflect.Struct:
		if d.objects[t.Name()] == nil {
			d.objects[t.Name()] = t
			d.order = append(d.order, t.Name())
		}
		return t.Name()
	case reflect.String:
		return "text"
	case reflect.Bool:
		return "true or false"
	}
	return "number"
}
