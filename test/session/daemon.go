package session

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// HomeOf is the home of the script's session.
func HomeOf(ts *testscript.TestScript) *home.Home {
	h, err := home.Open(Of(ts).Home)
	ts.Check(err)
	return h
}

// cmdAPI speaks to the daemon as curl would. Its stdout is the answer's body,
// whatever the status.
func cmdAPI(ts *testscript.TestScript, neg bool, args []string) {
	Usage(ts, neg, args, 2, "api METHOD JSON")
	socket := HomeOf(ts).Socket()
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
	setStdout(ts, body)
}

// cmdKill9 takes the pids from the daemon itself, but for standbys.
func cmdKill9(ts *testscript.TestScript, neg bool, args []string) {
	Usage(ts, neg, args, 1, "kill9 daemon|standbys|monitor|machine [NAME]")
	if args[0] == "standbys" {
		ts.Check(Of(ts).killStandbys())
		return
	}
	path := "pid"
	if args[0] == "daemon" {
		ts.Check(ts.Exec("holdpoint", "daemon", "status", "--json"))
	} else {
		Usage(ts, neg, args, 2, "kill9 monitor|machine NAME")
		ts.Check(ts.Exec("holdpoint", "inspect", args[1], "--json"))
		path = map[string]string{"monitor": "machine.monitor_pid", "machine": "machine.qemu_pid"}[args[0]]
	}
	text, ok := LookUp(ts, path)
	pid, err := strconv.Atoi(text)
	if !ok || err != nil || pid <= 1 {
		ts.Fatalf("no pid at %s: %q", path, text)
	}
	ts.Check(KillAndWait(pid))
}

// killStandbys kills the machine's process of each standby.
func (s *Session) killStandbys() error {
	db, err := s.Catalog()
	if err != nil {
		return err
	}
	defer db.Close()
	runs, err := query(db, `SELECT run_id FROM standbys`)
	if err != nil {
		return err
	}
	for _, id := range runs {
		rec, err := monitor.ReadRecord(filepath.Join(s.Home, "runs", id))
		if err != nil {
			return err
		}
		if rec.Process == nil {
			return fmt.Errorf("standby %s has no process", id)
		}
		if err := KillAndWait(rec.Process.PID); err != nil {
			return err
		}
	}
	return nil
}

// cmdRunning counts the machines' processes.
func cmdRunning(ts *testscript.TestScript, neg bool, args []string) {
	Usage(ts, neg, args, 1, "running N")
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	ts.Check(Await(func() error {
		procs, err := Of(ts).Processes()
		if err != nil {
			return err
		}
		monitors, machines := 0, 0
		for _, p := range procs {
			if p.IsMonitor() {
				monitors++
			}
			if p.IsMachine() {
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
	Usage(ts, neg, args, 2, "httpget URL PATTERN")
	target, err := url.Parse(args[0])
	ts.Check(err)
	pattern, err := regexp.Compile("(?m)" + args[1])
	ts.Check(err)
	c := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", target.Port()))
		},
		DisableKeepAlives: true,
	}}
	ts.Check(Await(func() error {
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
