package script_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/holdpoint/holdpoint/internal/home"
)

func homeOf(ts *testscript.TestScript) *home.Home {
	h, err := home.Open(sessionOf(ts).home)
	ts.Check(err)
	return h
}

// cmdAPI speaks to the daemon as curl would. Its stdout is the answer's body,
// whatever the status.
func cmdAPI(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, args, 2, "api METHOD JSON")
	socket := homeOf(ts).Socket()
	c := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
		DisableKeepAlives: true,
	}}
	resp, err := c.Post("http://holdpoint/holdpoint.v1."+args[0], "application/json", strings.NewReader(args[1]))
	ts.Check(err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	ts.Check(err)
	ts.Check(os.WriteFile(ts.MkAbs("answer.json"), body, 0o600))
	ts.Check(ts.Exec("cat", ts.MkAbs("answer.json")))
}

func cmdFault(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, args, 1, "fault NAME [TEXT]")
	path := filepath.Join(sessionOf(ts).faults, args[0])
	ts.Check(os.WriteFile(path, []byte(strings.Join(args[1:], " ")), 0o600))
}

func cmdUnfault(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, args, 1, "unfault NAME")
	ts.Check(os.Remove(filepath.Join(sessionOf(ts).faults, args[0])))
}

// cmdKill9 takes the pids from the daemon itself.
func cmdKill9(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, args, 1, "kill9 daemon|monitor|machine [NAME]")
	path := "pid"
	if args[0] == "daemon" {
		ts.Check(ts.Exec("holdpoint", "daemon", "status", "--json"))
	} else {
		usage(ts, neg, args, 2, "kill9 monitor|machine NAME")
		ts.Check(ts.Exec("holdpoint", "inspect", args[1], "--json"))
		path = map[string]string{"monitor": "machine.monitor_pid", "machine": "machine.qemu_pid"}[args[0]]
	}
	text, ok := lookUp(ts, path)
	pid, err := strconv.Atoi(text)
	if !ok || err != nil || pid <= 1 {
		ts.Fatalf("no pid at %s: %q", path, text)
	}
	ts.Check(killAndWait(pid))
}

// cmdRunning counts the machines' processes.
func cmdRunning(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, args, 1, "running N")
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	ts.Check(await(func() error {
		procs, err := sessionOf(ts).processes()
		if err != nil {
			return err
		}
		monitors, machines := 0, 0
		for _, p := range procs {
			if p.isMonitor() {
				monitors++
			}
			if p.isFake() && strings.HasSuffix(p.cmdline, " machine ") {
				machines++
			}
		}
		if monitors != want || machines != want {
			return fmt.Errorf("%d monitors and %d machines run, want %d of each: %v", monitors, machines, want, procs)
		}
		return nil
	}))
}

// cmdHTTPGet asks for a URL of a route. The name is not looked up: routes
// answer on the loopback address.
func cmdHTTPGet(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, args, 2, "httpget URL PATTERN")
	target, err := url.Parse(args[0])
	ts.Check(err)
	pattern, err := regexp.Compile(args[1])
	ts.Check(err)
	c := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", target.Port()))
		},
		DisableKeepAlives: true,
	}}
	ts.Check(await(func() error {
		resp, err := c.Get(args[0])
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		text := resp.Status + "\n" + string(body)
		if !pattern.MatchString(text) {
			return fmt.Errorf("%s does not match %q: %s", args[0], args[1], text)
		}
		return nil
	}))
}

// cmdOtherBuild copies the binary with another build id. The id is in the ELF
// note that the Go linker writes (cmd/internal/buildid); nothing else reads it.
func cmdOtherBuild(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, args, 0, "otherbuild")
	data, err := os.ReadFile(sessionOf(ts).binary)
	ts.Check(err)
	note := []byte("\x04\x00\x00\x00Go\x00\x00")
	i := bytes.Index(data[:32<<10], note)
	if i < 0 {
		ts.Check(errors.New("the binary has no build id"))
	}
	id := data[i+len(note):]
	if id[0] == 'x' {
		id[0] = 'y'
	} else {
		id[0] = 'x'
	}
	dir := filepath.Join(filepath.Dir(sessionOf(ts).home), "other")
	ts.Check(os.Mkdir(dir, 0o700))
	ts.Check(os.WriteFile(filepath.Join(dir, "holdpoint"), data, 0o700))
	ts.Check(os.Symlink("holdpoint", filepath.Join(dir, "holdpoint2")))
	ts.Setenv("OTHER", filepath.Join(dir, "holdpoint"))
}
