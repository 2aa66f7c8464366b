//go:build unix

package cli_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/api/holdpoint/v1/holdpointv1connect"
	"github.com/holdpoint/holdpoint/internal/cli"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
)

// childDaemon is a daemon that has a home's lock and socket, and nothing else.
func childDaemon(ctx context.Context, run cli.DaemonRun) error {
	if why := os.Getenv("HOLDPOINT_TEST_FAIL"); why == "die" {
		os.Exit(1)
	} else if why != "" {
		return errdefs.New(errdefs.Storage, "open the catalog: %s", why)
	}
	if err := run.Home.Create(); err != nil {
		return err
	}
	var files durable.FS
	lock, err := files.Lock(run.Home.Lock())
	if err != nil {
		return err
	}
	defer lock.Unlock()
	_ = os.Remove(run.Home.Socket()) // of one that was killed
	listener, err := net.Listen("unix", run.Home.Socket())
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	d := &daemonOnly{run: run, stop: stop}
	mux := http.NewServeMux()
	mux.Handle(holdpointv1connect.NewDaemonServiceHandler(d))
	mux.Handle(holdpointv1connect.NewMachineServiceHandler(noMachines{}))
	server := &http.Server{Handler: mux}
	context.AfterFunc(ctx, func() { server.Shutdown(context.Background()) })
	run.Ready()
	_ = server.Serve(listener) // Shutdown ends it
	return context.Cause(ctx)
}

type daemonOnly struct {
	holdpointv1connect.UnimplementedDaemonServiceHandler
	run  cli.DaemonRun
	stop func()
}

func (d *daemonOnly) Status(context.Context, *connect.Request[holdpointv1.DaemonStatusRequest]) (*connect.Response[holdpointv1.DaemonStatusResponse], error) {
	return connect.NewResponse(&holdpointv1.DaemonStatusResponse{Pid: int64(os.Getpid()), Build: d.run.Build, Home: d.run.Home.Dir()}), nil
}

func (d *daemonOnly) Stop(context.Context, *connect.Request[holdpointv1.DaemonStopRequest]) (*connect.Response[holdpointv1.DaemonStopResponse], error) {
	d.stop()
	return connect.NewResponse(&holdpointv1.DaemonStopResponse{}), nil
}

type noMachines struct {
	holdpointv1connect.UnimplementedMachineServiceHandler
}

func (noMachines) List(context.Context, *connect.Request[holdpointv1.ListMachinesRequest]) (*connect.Response[holdpointv1.ListMachinesResponse], error) {
	return connect.NewResponse(&holdpointv1.ListMachinesResponse{}), nil
}

// child runs one command line as a process, of the given build.
func child(t *testing.T, dir, build string, args ...string) run {
	t.Helper()
	cmd := command(t, dir, args...)
	cmd.Env = append(cmd.Env, mainVar+"="+build)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	_ = cmd.Run() // its code is looked at
	return run{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

// daemonHome is a home whose daemon is stopped when the test ends.
func daemonHome(t *testing.T) string {
	t.Helper()
	dir := shortDir(t)
	t.Cleanup(func() {
		if r := child(t, dir, "one", "daemon", "stop"); r.code != 0 {
			t.Errorf("stop the daemon: %+v", r)
		}
	})
	return dir
}

func statusOf(t *testing.T, dir string) (pid int, build string) {
	t.Helper()
	r := child(t, dir, "one", "daemon", "status", "--json")
	var status struct {
		PID   int
		Build string
	}
	if err := json.Unmarshal([]byte(r.stdout), &status); err != nil || r.code != 0 {
		t.Fatalf("status: %+v, %v", r, err)
	}
	return status.PID, status.Build
}

// Whoever starts a daemon in memory is told what comes of it.
func TestHomeInMemory(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "hp")
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if r := child(t, dir, "one", "daemon", "stop"); r.code != 0 {
			t.Errorf("stop the daemon: %+v", r)
		}
		os.RemoveAll(dir)
	})
	h, err := home.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if why, _ := h.Unfit(); why == "" {
		t.Skip("/dev/shm is not in memory here")
	}
	r := child(t, dir, "one", "ls")
	if r.code != 0 || !strings.Contains(r.stderr, "\nholdpoint: warning: "+dir+" is on tmpfs, which is in memory") || strings.Count(r.stderr, "\n") != 2 {
		t.Errorf("the first verb: %+v", r)
	}
	if r := child(t, dir, "one", "ls"); r.stderr != "" {
		t.Errorf("the second verb: %+v", r)
	}
}

func TestDaemonLife(t *testing.T) {
	dir := daemonHome(t)
	if r := child(t, dir, "one", "daemon", "status"); r.code != 3 || !strings.Contains(r.stderr, "no daemon runs for home "+dir) {
		t.Fatalf("status without one: %+v", r)
	}
	if r := child(t, dir, "one", "daemon", "stop"); r.code != 0 {
		t.Errorf("stop without one: %+v", r)
	}
	r := child(t, dir, "one", "ls")
	pid, build := statusOf(t, dir)
	if want := fmt.Sprintf("holdpoint: started the daemon (pid %d)\n", pid); r.code != 0 || !strings.HasPrefix(r.stderr, want) {
		t.Errorf("first ls: %+v, want %q", r, want)
	}
	if !strings.HasPrefix(build, "one+") || len(build) != len("one+")+12 {
		t.Errorf("build %q", build)
	}
	if r := child(t, dir, "one", "ls"); r.code != 0 || r.stderr != "" {
		t.Errorf("second ls: %+v", r)
	}
	if r := child(t, dir, "one", "daemon", "run"); r.code != 4 || !strings.Contains(r.stderr, fmt.Sprint(pid)) {
		t.Errorf("a second daemon: %+v", r)
	}
	// Another build replaces it.
	r = child(t, dir, "two", "ls")
	after, build := statusOf(t, dir)
	want := fmt.Sprintf("holdpoint: replaced the daemon of build %s (pid %d); machines run on\nholdpoint: started the daemon (pid %d)\n",
		strings.Replace(build, "two", "one", 1), pid, after)
	if r.code != 0 || r.stderr != want {
		t.Errorf("ls of another build: %+v, want %q", r, want)
	}
	// One that was killed is started again, over its stale socket.
	if err := syscall.Kill(after, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if r := child(t, dir, "two", "ls"); r.code != 0 || !strings.Contains(r.stderr, "started the daemon") {
		t.Errorf("ls after a kill: %+v", r)
	}
	if r := child(t, dir, "two", "daemon", "stop", "--json"); r.code != 0 || strings.Contains(r.stdout, `"pid": 0`) {
		t.Errorf("stop: %+v", r)
	}
	if r := child(t, dir, "two", "daemon", "status"); r.code != 3 {
		t.Errorf("status after stop: %+v", r)
	}
}

// Many command lines at once start one daemon, and none of them fails.
func TestStartAtOnce(t *testing.T) {
	dir := daemonHome(t)
	results := make(chan run, 6)
	for range cap(results) {
		go func() {
			results <- child(t, dir, "one", "ls")
		}()
	}
	started := 0
	for range cap(results) {
		r := <-results
		started += strings.Count(r.stderr, "started the daemon")
		if r.code != 0 {
			t.Errorf("%+v", r)
		}
	}
	if started != 1 {
		t.Errorf("%d daemons were started", started)
	}
}

// Why a daemon cannot start is told by the command line that wanted it.
func TestStartFails(t *testing.T) {
	dir := daemonHome(t)
	t.Setenv("HOLDPOINT_TEST_FAIL", "catalog.db is damaged")
	r := child(t, dir, "one", "ls")
	if want := (run{9, "", "holdpoint: start the daemon: open the catalog: catalog.db is damaged\n"}); r != want {
		t.Errorf("%+v", r)
	}
	t.Setenv("HOLDPOINT_TEST_FAIL", "die")
	r = child(t, dir, "one", "ls")
	if r.code != 1 || !strings.Contains(r.stderr, "it ended at once; look into "+dir+"/log/daemon.log") {
		t.Errorf("%+v", r)
	}
	t.Setenv("HOLDPOINT_TEST_FAIL", "")
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if r = child(t, dir, "one", "ls"); r.code != 11 || !strings.Contains(r.stderr, "chmod 700") {
		t.Errorf("%+v", r)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
}
