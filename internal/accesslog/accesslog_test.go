package accesslog_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/accesslog"
)

func at() time.Time { return time.Date(2026, 11, 30, 18, 5, 12, 345_000_000, time.UTC) }

func TestLines(t *testing.T) {
	for name, c := range map[string]struct {
		entry accesslog.Entry
		want  string
	}{
		"request": {
			accesslog.Entry{Client: "127.0.0.1:5", Method: "GET", Path: "/a", Protocol: "HTTP/1.1", Status: 200, Sent: 12, Took: 1500 * time.Microsecond},
			"127.0.0.1:5 GET /a HTTP/1.1 200 12 1.5ms",
		},
		"secret": {
			accesslog.Entry{Client: "127.0.0.1:5", Method: "GET", Path: "/a", Query: true, Protocol: "HTTP/2.0", Status: 502, Note: "no answer"},
			"127.0.0.1:5 GET /a?... HTTP/2.0 502 0 0.0ms (no answer)",
		},
		"hostile": {
			accesslog.Entry{Client: "127.0.0.1:5", Method: "GET", Path: "/\x1b]0;x\x07 \n\u202eé", Protocol: "HTTP/1.1", Status: 404, Note: "bad\x1b[2J\nthing"},
			"127.0.0.1:5 GET /%1B]0;x%07%20%0A%E2%80%AE%C3%A9 HTTP/1.1 404 0 0.0ms (bad%1B[2J thing)",
		},
		"long": {
			accesslog.Entry{Client: "c", Method: "GET", Path: "/" + strings.Repeat("x", 10000), Protocol: "HTTP/1.1", Status: 414},
			"c GET /" + strings.Repeat("x", 511) + "... HTTP/1.1 414 0 0.0ms",
		},
		"tcp": {
			accesslog.Entry{Client: "127.0.0.1:5", Received: 3, Sent: 4, Took: 2 * time.Second},
			"127.0.0.1:5 TCP in=3 out=4 2000.0ms",
		},
	} {
		c.entry.At = at()
		if diff := cmp.Diff("2026-11-30T18:05:12.345Z "+c.want, c.entry.String()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func read(t *testing.T, l *accesslog.Log, machine, host string) (text string, files int) {
	t.Helper()
	paths, err := l.Files(machine, host)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range paths {
		b, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		text += string(b)
	}
	return text, len(paths)
}

func TestALogIsBoundedAndGoesOn(t *testing.T) {
	dir := t.TempDir()
	l := accesslog.New(dir)
	entry := accesslog.Entry{At: at(), Client: "c", Method: "GET", Path: "/" + strings.Repeat("x", 500), Protocol: "HTTP/1.1", Status: 200}
	for i := range 5000 {
		if i == 2500 {
			l = accesslog.New(dir) // another daemon
		}
		entry.Status = 200 + i%10
		if err := l.Add("m1", "app.localhost", entry); err != nil {
			t.Fatal(err)
		}
	}
	text, files := read(t, l, "m1", "app.localhost")
	if len(text) > 1<<20 || len(text) < 512<<10 || files != 2 {
		t.Errorf("%d bytes in %d files", len(text), files)
	}
	if !strings.HasSuffix(text, " 209 0 0.0ms\n") {
		t.Errorf("the last line is not the last: %q", text[len(text)-80:])
	}
}

func TestLogsGoWithTheirMachines(t *testing.T) {
	l := accesslog.New(t.TempDir())
	for _, m := range []string{"m1", "m2"} {
		if err := l.Add(m, "app.localhost", accesslog.Entry{At: at(), Client: m}); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Keep(func(id string) bool { return id == "m2" }); err != nil {
		t.Fatal(err)
	}
	if text, _ := read(t, l, "m1", "app.localhost"); text != "" {
		t.Errorf("of the removed machine: %q", text)
	}
	if text, _ := read(t, l, "m2", "app.localhost"); !strings.Contains(text, "m2 TCP") {
		t.Errorf("of the other one: %q", text)
	}
	if err := l.Add("m1", "app.localhost", accesslog.Entry{At: at(), Client: "again"}); err != nil {
		t.Fatal(err)
	}
	if err := (*accesslog.Log)(nil).Add("m", "h", accesslog.Entry{}); err != nil {
		t.Fatal(err)
	}
}

// TestLongHostNamesHaveLogsOfTheirOwn: they differ in their last letters only,
// or in that one of them is the beginning of the other.
func TestLongHostNamesHaveLogsOfTheirOwn(t *testing.T) {
	l := accesslog.New(t.TempDir())
	long := strings.Repeat("a.", 100)
	hosts := []string{long[:199], long + "app.localhost", long + "api.localhost", long + strings.Repeat("b", 53)}
	for _, host := range hosts {
		if err := l.Add("m", host, accesslog.Entry{At: at(), Client: host}); err != nil {
			t.Fatal(err)
		}
	}
	for _, host := range hosts {
		if text, _ := read(t, l, "m", host); strings.Count(text, "\n") != 1 || !strings.Contains(text, " "+host+" ") {
			t.Errorf("%s: %q", host, text)
		}
	}
}
