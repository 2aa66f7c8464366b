package view_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/cli/view"
)

func TestSize(t *testing.T) {
	for bytes, want := range map[int64]string{
		0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 512 << 20: "512 MiB", 8 << 30: "8 GiB",
		1<<30 - 1: "1 GiB", 1<<63 - 1: "8192 PiB",
	} {
		if got := view.Size(bytes); got != want {
			t.Errorf("Size(%d) = %q, want %q", bytes, got, want)
		}
	}
}

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{
		"1": 1, "4096": 4096, "512M": 512 << 20, "512m": 512 << 20, "512MB": 512 << 20, "512MiB": 512 << 20,
		" 1.5 G ": 3 << 29, "2T": 2 << 40, "10B": 10,
	} {
		if got, err := view.ParseSize(text); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "M", "x", "-1", "0", "0.1", "1e400", "NaN", "Inf", "1Q", "1 M M", "9999999P"} {
		if got, err := view.ParseSize(text); err == nil {
			t.Errorf("ParseSize(%q) = %d, want an error", text, got)
		}
	}
}

// What a size is shown as is read as nearly the same size.
func TestSizesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(1, 1<<50).Draw(t, "n")
		got, err := view.ParseSize(view.Size(n))
		if err != nil || float64(got) < 0.94*float64(n) || float64(got) > 1.06*float64(n) {
			t.Fatalf("%d, as %q, is read as %d, %v", n, view.Size(n), got, err)
		}
	})
}

func TestAge(t *testing.T) {
	now := time.Now()
	for d, want := range map[time.Duration]string{
		-time.Hour: "now", 0: "now", time.Second: "1 s ago", 90 * time.Second: "1 min ago", 47 * time.Hour: "47 h ago", 49 * time.Hour: "2 d ago",
	} {
		if got := view.Age(now.Add(-d), now); got != want {
			t.Errorf("Age of %s = %q, want %q", d, got, want)
		}
	}
	if got := view.Age(time.Time{}, now); got != "-" {
		t.Errorf("Age of no time = %q", got)
	}
}

// Nothing that came from a guest can move the cursor.
func TestHarmless(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.String().Draw(t, "s")
		var b strings.Builder
		if n, err := view.Harmless(&b).Write([]byte(s)); n != len(s) || err != nil {
			t.Fatal(n, err)
		}
		if strings.ContainsAny(b.String(), "\x1b\r\b\x07\x7f\u009b\u202e\u2066\u200f") || strings.ContainsAny(view.Line(s), "\x1b\r\n\t\b\x07\x7f\u009b\u202e\u2066\u200f") {
			t.Fatalf("%q became %q and %q", s, b.String(), view.Line(s))
		}
	})
}

// Characters that turn the order of writing around go, also in two parts, and
// others that come in parts stay.
func TestHarmlessOrder(t *testing.T) {
	const text = "a\u202eb\u2066c\u061cd é€"
	for cut := range text {
		var b strings.Builder
		w := view.Harmless(&b)
		for _, part := range []string{text[:cut], text[cut : cut+1], text[cut+1:]} {
			if n, err := w.Write([]byte(part)); n != len(part) || err != nil {
				t.Fatal(n, err)
			}
		}
		if b.String() != "abcd é€" {
			t.Errorf("cut at %d: %q", cut, b.String())
		}
	}
	if got := view.Line(text); got != "a?b?c?d é€" {
		t.Errorf("as a line %q", got)
	}
}

func TestBrief(t *testing.T) {
	for text, want := range map[string]string{
		"short": "short", "two\nlines": "two lines", "0123456789": "0123456789", "0123456789x": "012345678…", "01234567 9x": "01234567…",
	} {
		if got := view.Brief(text, 10); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	long := &holdpointv1.Checkpoint{Message: strings.Repeat("ä", 100)}
	if got := []rune(view.Message(long)); len(got) != 60 {
		t.Errorf("a message has %d characters in a list", len(got))
	}
}

func at(hour int) *timestamppb.Timestamp {
	return timestamppb.New(time.Date(2030, 1, 1, hour, 0, 0, 0, time.UTC))
}

func point(id, parent, machine string, hour int) *holdpointv1.Checkpoint {
	return &holdpointv1.Checkpoint{
		Id: id, Parent: parent, MachineId: machine, Machine: "name-" + machine, Kind: "disk", Consistency: "stopped", CreatedAt: at(hour),
	}
}

func TestTree(t *testing.T) {
	m := func(id, head string) *holdpointv1.Machine {
		return &holdpointv1.Machine{Id: id, Name: "name-" + id, State: "running", Image: "debian", Head: head}
	}
	fork := func(id, head, of string) *holdpointv1.Machine {
		f := m(id, head)
		f.ForkedFrom = of
		return f
	}
	for _, test := range []struct {
		name        string
		machines    []*holdpointv1.Machine
		checkpoints []*holdpointv1.Checkpoint // oldest first, unlike List
		want        string
	}{
		{"nothing yet", []*holdpointv1.Machine{m("a", "")}, nil, `
name-a  running, image debian
● now
`},
		{"restored twice", []*holdpointv1.Machine{m("a", "5")}, []*holdpointv1.Checkpoint{
			point("1", "", "a", 1), point("2", "1", "a", 2), point("3", "2", "a", 3), point("4", "1", "a", 4), point("5", "1", "a", 5),
		}, `
name-a  running, image debian
○ 1  disk stopped  23 h ago
├─○ 2  disk stopped  22 h ago
│ ○ 3  disk stopped  21 h ago
├─○ 4  disk stopped  20 h ago
○ 5  disk stopped  19 h ago
● now
`},
		{"restored to an old one", []*holdpointv1.Machine{m("a", "1")}, []*holdpointv1.Checkpoint{
			point("1", "", "a", 1), point("2", "1", "a", 2), point("3", "2", "a", 3), point("4", "2", "a", 4),
		}, `
name-a  running, image debian
○ 1  disk stopped  23 h ago
├─○ 2  disk stopped  22 h ago
│ ├─○ 3  disk stopped  21 h ago
│ ○ 4  disk stopped  20 h ago
● now
`},
		{"a head that was forgotten", []*holdpointv1.Machine{m("a", "9")}, []*holdpointv1.Checkpoint{
			point("1", "", "a", 1), point("2", "9", "a", 2),
		}, `
name-a  running, image debian
├─○ 1  disk stopped  23 h ago
├─○ 2  disk stopped  22 h ago
● now
`},
		{"at the image, with checkpoints beside it", []*holdpointv1.Machine{m("a", "")}, []*holdpointv1.Checkpoint{
			point("1", "", "a", 1), point("2", "1", "a", 2), point("3", "", "a", 3),
		}, `
name-a  running, image debian
├─○ 1  disk stopped  23 h ago
│ ○ 2  disk stopped  22 h ago
├─○ 3  disk stopped  21 h ago
● now
`},
		{"a fork, and a machine that is gone", []*holdpointv1.Machine{m("b", "2")}, []*holdpointv1.Checkpoint{
			point("1", "", "a", 1), point("2", "1", "b", 2),
		}, `
name-b  running, image debian
○ 2  disk stopped  22 h ago  (fork of name-a 1)
● now

name-a  (gone; its checkpoints are kept)
○ 1  disk stopped  23 h ago
`},
		{"forks, all in view", []*holdpointv1.Machine{m("a", "1"), fork("b", "1", "1"), fork("c", "3", "1")}, []*holdpointv1.Checkpoint{
			point("1", "", "a", 1), point("3", "1", "c", 3),
		}, `
name-a  running, image debian
○ 1  disk stopped  23 h ago
● now

name-b  running, image debian, fork of name-a 1
● now

name-c  running, image debian, fork of name-a 1
○ 3  disk stopped  21 h ago  (fork of name-a 1)
● now
`},
		{"a fork alone", []*holdpointv1.Machine{fork("b", "1", "1")}, nil, `
name-b  running, image debian, fork of 1
● now
`},
		{"a circle in the records", []*holdpointv1.Machine{m("a", "1")}, []*holdpointv1.Checkpoint{
			point("1", "2", "a", 1), point("2", "1", "a", 2),
		}, `
name-a  running, image debian
`},
	} {
		t.Run(test.name, func(t *testing.T) {
			newest := make([]*holdpointv1.Checkpoint, 0, len(test.checkpoints))
			for i := range test.checkpoints {
				newest = append(newest, test.checkpoints[len(test.checkpoints)-1-i])
			}
			var b strings.Builder
			if err := (view.Tree{Now: at(24).AsTime()}).Draw(&b, test.machines, newest); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.TrimPrefix(test.want, "\n"), b.String()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Each case of contract 1, R4 and R5: what a person is told before a restore.
func TestRouteWarnings(t *testing.T) {
	for _, test := range []struct {
		change    string
		then, now uint32
		listening string
		keep      string
		restore   string
	}{
		{"same", 80, 80, "unknown", "", ""},
		{"same", 80, 80, "no", "will be broken: nothing will listen on port 80", ""},
		{"changed", 8080, 9090, "unknown", "will be broken: the route leads to port 9090, and on the restored disk the service is back on port 8080", ""},
		{"changed", 8080, 9090, "no", "will be broken", ""},
		{"changed", 8080, 9090, "yes", "", ""},
		{"added", 0, 80, "unknown", "not known whether", "will be withdrawn"},
		{"added", 0, 80, "yes", "", "will be withdrawn"},
		{"added", 0, 80, "no", "will be broken", "will be withdrawn"},
		{"removed", 80, 0, "unknown", "--routes=restore publishes it again", ""},
		{"foreign", 80, 80, "unknown", "belongs to machine mail", "belongs to machine mail"},
	} {
		plan := &holdpointv1.RestorePlan{Routes: []*holdpointv1.RouteChange{
			{Host: "h", Change: test.change, Then: test.then, Now: test.now, Listening: test.listening, Owner: "mail"},
		}}
		for routes, want := range map[string]string{"": test.keep, "keep": test.keep, "restore": test.restore} {
			got := strings.Join(view.RestoreWarnings(plan, view.Asked{Kind: "disk", Routes: routes}), "\n")
			if want == "" && got != "" || !strings.Contains(got, want) {
				t.Errorf("%s, listening %s, --routes=%s: %q, want %q", test.change, test.listening, routes, got, want)
			}
		}
	}
}

// A guest that does not answer may run anything.
func TestPlanOfASilentGuest(t *testing.T) {
	for _, silent := range []bool{true, false} {
		var b strings.Builder
		if err := view.PrintPlan(&b, &holdpointv1.RestorePlan{Machine: "web", CommandsUnknown: silent}, view.Asked{Kind: "disk"}); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(b.String(), "What runs in it is not known: the guest does not answer.\n") != silent {
			t.Errorf("silent %v: %s", silent, &b)
		}
	}
}

// The disk of a full checkpoint is that of a machine in the middle of its work,
// and a checkpoint without a name is named once.
func TestPlanOfAFullCheckpoint(t *testing.T) {
	plan := &holdpointv1.RestorePlan{
		Machine:    "web",
		Checkpoint: &holdpointv1.Checkpoint{Id: "c1000000000000aa", Kind: "full", CreatedAt: timestamppb.Now()},
	}
	for kind, crash := range map[string]bool{"disk": true, "full": false} {
		var b strings.Builder
		if err := view.PrintPlan(&b, plan, view.Asked{Kind: kind, Safety: true}); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(b.String(), "as after a power cut"); got != crash {
			t.Errorf("restore --%s: says that the disk is as after a power cut: %v, want %v\n%s", kind, got, crash, &b)
		}
		if n := strings.Count(b.String(), "c10000000000"); n != 1 {
			t.Errorf("restore --%s: names the checkpoint %d times, want once\n%s", kind, n, &b)
		}
	}
}
