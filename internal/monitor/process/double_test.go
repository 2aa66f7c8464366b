//go:build linux

package process_test

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// double is a hypervisor whose run is one process of the test binary that
// outlives the monitor, writes down what is done to it (events.log in the
// run's folder), and has an agent of its own behind the real agent link. Files
// in the run's folder make it misbehave.
type double struct{ machine.Hypervisor }

func event(dir, format string, args ...any) {
	f, err := os.OpenFile(filepath.Join(dir, "events.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		panic(err)
	}
	defer f.Close()
	fmt.Fprintf(f, format+"\n", args...)
}

func has(dir, name string) bool {
	_, err := os.Stat(filepath.Join(dir, name))
	return err == nil
}

func (double) Launch(_ context.Context, cfg machine.RunConfig) (machine.Run, error) {
	event(cfg.Dir, "launch %s", chain(cfg.Disk)+incoming(cfg))
	if has(cfg.Dir, "launch-fails") {
		return nil, errdefs.New(errdefs.Unsupported, "launch run: no such hypervisor here; install one")
	}
	spec, err := json.Marshal(cfg)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(os.Args[0], "double-guest")
	cmd.Env = append(os.Environ(), "DOUBLE_SPEC="+string(spec))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Stderr = os.Stderr // monitor.log
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "up\n" {
		return nil, fmt.Errorf("launch double: %q, %v", line, err)
	}
	if has(cfg.Dir, "die-after-launch") {
		_ = os.Remove(filepath.Join(cfg.Dir, "die-after-launch"))
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	return newDoubleRun(cfg, cmd.Process.Pid)
}

func (double) Adopt(_ context.Context, cfg machine.RunConfig, p machine.Process) (machine.Run, error) {
	event(cfg.Dir, "adopt %s", chain(cfg.Disk))
	if has(cfg.Dir, "adopt-fails") {
		return nil, errors.New("adopt run: it does not answer")
	}
	r, err := newDoubleRun(cfg, p.PID)
	if err != nil || r.p != p {
		return nil, errdefs.New(errdefs.NotFound, "adopt run: the process has ended")
	}
	return r, nil
}

// ExitOf is that of machine.Coroner.
func (double) ExitOf(cfg machine.RunConfig) machine.Exit { return exitOf(cfg) }

func exitOf(cfg machine.RunConfig) machine.Exit {
	b, err := os.ReadFile(filepath.Join(cfg.Dir, "exit-"+cfg.RunID))
	if err != nil {
		return machine.Exit{Reason: machine.Crashed, Message: "double crashed"}
	}
	return machine.Exit{Reason: machine.ExitReason(b)}
}

// incoming tells a run that continues from one that boots.
func incoming(cfg machine.RunConfig) string {
	if cfg.Incoming == nil {
		return ""
	}
	return " from " + cfg.Incoming.Checkpoint
}

func chain(disk []machine.Layer) string {
	var ids []string
	for _, l := range disk {
		ids = append(ids, l.ID)
	}
	return strings.Join(ids, ",")
}

type doubleRun struct {
	machine.Run
	cfg    machine.RunConfig
	p      machine.Process
	fd     int
	exited chan struct{}
	stop   *os.File // closed by Close, which ends a poll of bell
	once   sync.Once
	wg     sync.WaitGroup
	killed bool
}

func identify(pid int) (machine.Process, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return machine.Process{}, err
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if fields[0] == "Z" {
		return machine.Process{}, os.ErrNotExist
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return machine.Process{}, err
	}
	p := machine.Process{PID: pid, BootID: strings.TrimSpace(string(boot))}
	_, err = fmt.Sscan(fields[19], &p.StartTime)
	return p, err
}

func newDoubleRun(cfg machine.RunConfig, pid int) (*doubleRun, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, err
	}
	p, err := identify(pid)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	// It waits without a clock: what it would cost is counted as the monitor's.
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
		unix.Close(fd)
		return nil, err
	}
	bell := ends[0]
	r := &doubleRun{cfg: cfg, p: p, fd: fd, exited: make(chan struct{}), stop: os.NewFile(uintptr(ends[1]), "stop")}
	r.wg.Go(func() {
		defer unix.Close(fd)
		defer unix.Close(bell)
		for {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}, {Fd: int32(bell), Events: unix.POLLIN}}
			n, _ := unix.Poll(fds, -1)
			if n > 0 && fds[0].Revents != 0 {
				_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
				close(r.exited)
				return
			}
			if n > 0 {
				return
			}
		}
	})
	return r, nil
}

func (r *doubleRun) Process() machine.Process { return r.p }

func (r *doubleRun) call(ctx context.Context, words ...string) (string, error) {
	select {
	case <-r.exited:
		return "", errdefs.New(errdefs.WrongState, "%s: run has ended", words[0])
	default:
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", filepath.Join(r.cfg.SocketDir, "ctl.sock"))
	if err != nil {
		return "", err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	fmt.Fprintln(conn, strings.Join(words, " "))
	b, err := io.ReadAll(conn)
	if err != nil {
		return "", err
	}
	answer := strings.TrimSpace(string(b))
	if why, bad := strings.CutPrefix(answer, "error "); bad {
		return "", errors.New(why)
	}
	return answer, nil
}

func (r *doubleRun) Pause(ctx context.Context) error { _, err := r.call(ctx, "pause"); return err }

func (r *doubleRun) Resume(ctx context.Context) error { _, err := r.call(ctx, "resume"); return err }

func (r *doubleRun) Running(ctx context.Context) (bool, error) {
	a, err := r.call(ctx, "status")
	return a == "running", err
}

// AwaitStall waits for the double to say so.
func (r *doubleRun) AwaitStall(ctx context.Context) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", filepath.Join(r.cfg.SocketDir, "stall.sock"))
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		return cmp.Or(ctx.Err(), err)
	}
	return nil
}

// dieBefore ends the monitor, once, if that is wanted of it.
func (r *doubleRun) dieBefore(what string) {
	if has(r.cfg.Dir, "die-before-"+what) {
		_ = os.Remove(filepath.Join(r.cfg.Dir, "die-before-"+what))
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	}
}

func (r *doubleRun) SwitchDisk(ctx context.Context, top machine.Layer) error {
	r.dieBefore("switch")
	_, err := r.call(ctx, "switch", top.ID)
	return err
}

func (r *doubleRun) SwitchAtRest(ctx context.Context, top machine.Layer, atRest machine.AtRest) (switched bool, err error) {
	err = atRest(func(ctx context.Context) error {
		r.dieBefore("switch")
		for has(r.cfg.Dir, "switch-waits") {
			time.Sleep(5 * time.Millisecond)
		}
		_, err := r.call(ctx, "switch", top.ID)
		switched = err == nil
		return err
	})
	return switched, err
}

func (r *doubleRun) ReplaceLayers(ctx context.Context, _ []machine.Layer, _, _ int, merged machine.Layer) error {
	r.dieBefore("replace")
	_, err := r.call(ctx, "replace", merged.ID)
	return err
}

func (r *doubleRun) DialLink(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", filepath.Join(r.cfg.SocketDir, "link.sock"))
}

func (r *doubleRun) Kill(ctx context.Context) error {
	r.killed = true
	_ = unix.Kill(r.p.PID, unix.SIGKILL)
	select {
	case <-r.exited:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *doubleRun) Exited() <-chan struct{} { return r.exited }

func (r *doubleRun) Exit() machine.Exit {
	if r.killed {
		return machine.Exit{Reason: machine.Killed}
	}
	return exitOf(r.cfg)
}

func (r *doubleRun) Close() error {
	r.once.Do(func() { _ = r.stop.Close() })
	r.wg.Wait()
	return nil
}

// guest is the body of the double's process.
type guest struct {
	agentv1connect.UnimplementedAgentServiceHandler
	cfg machine.RunConfig

	mu      sync.Mutex
	awake   *sync.Cond
	running bool
	stalled bool
	disk    []string
	behind  time.Duration // of the guest's clock

	configured *agentv1.ConfigureRequest
	off        bool // power off once the host has heard the answer
}

func guestMain() {
	g := &guest{}
	if err := json.Unmarshal([]byte(os.Getenv("DOUBLE_SPEC")), &g.cfg); err != nil {
		panic(err)
	}
	g.awake = sync.NewCond(&g.mu)
	for _, l := range g.cfg.Disk {
		g.disk = append(g.disk, l.ID)
	}
	if in := g.cfg.Incoming; in != nil && !in.Unconfigured {
		g.configured, g.behind = &agentv1.ConfigureRequest{}, time.Hour
	}
	ctl, lnk, stall := g.listen("ctl.sock"), g.listen("link.sock"), g.listen("stall.sock")
	go g.control(ctl)
	go g.tellStalls(stall)
	fmt.Println("up")
	g.serve(lnk)
}

func (g *guest) listen(name string) net.Listener {
	path := filepath.Join(g.cfg.SocketDir, name)
	_ = os.Remove(path)
	ln, err := net.Listen("unix", path)
	if err != nil {
		panic(err)
	}
	return ln
}

func (g *guest) exit(reason machine.ExitReason) {
	if err := os.WriteFile(filepath.Join(g.cfg.Dir, "exit-"+g.cfg.RunID), []byte(reason), 0o600); err != nil {
		panic(err)
	}
	os.Exit(0)
}

func (g *guest) control(ln net.Listener) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			panic(err)
		}
		line, _ := bufio.NewReader(conn).ReadString('\n')
		fmt.Fprintln(conn, g.obey(strings.Fields(line)))
		conn.Close()
	}
}

// tellStalls writes to each connection once the guest has stalled.
func (g *guest) tellStalls(ln net.Listener) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			panic(err)
		}
		go func() {
			defer conn.Close()
			g.mu.Lock()
			defer g.mu.Unlock()
			for !g.stalled {
				g.awake.Wait()
			}
			fmt.Fprintln(conn, "stalled")
		}()
	}
}

func (g *guest) obey(words []string) string {
	if len(words) == 0 {
		return "error no command" // the monitor died before it said one
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	switch words[0] {
	case "status":
		if g.running {
			return "running"
		}
		return "paused"
	case "pause", "resume":
		if has(g.cfg.Dir, words[0]+"-fails") {
			event(g.cfg.Dir, "%s refused", words[0])
			return "error " + words[0] + " does not work"
		}
		g.running = words[0] == "resume"
		if g.running {
			g.stalled = has(g.cfg.Dir, "disk-full")
			g.running = !g.stalled
		}
		g.awake.Broadcast()
	case "stall":
		g.running, g.stalled = false, true
		g.awake.Broadcast()
	case "behind":
		g.behind += 300 * time.Millisecond
	case "switch":
		if has(g.cfg.Dir, "switch-fails") {
			return "error the switch does not work"
		}
		if !slices.Contains(g.disk, words[1]) {
			g.disk = append(g.disk, words[1])
		}
	case "replace":
		if has(g.cfg.Dir, "replace-fails") {
			return "error the replacement does not work"
		}
	case "reset", "panic", "poweroff":
		g.exit(map[string]machine.ExitReason{"reset": machine.GuestReset, "panic": machine.GuestPanic, "poweroff": machine.GuestShutdown}[words[0]])
	case "crash":
		os.Exit(3)
	}
	event(g.cfg.Dir, "%s", strings.Join(words, " "))
	return "ok"
}

// gate holds while the CPUs stand still.
func (g *guest) gate() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for !g.running {
		g.awake.Wait()
	}
}

// serve carries bytes between the one host connection and the guest's port.
func (g *guest) serve(ln net.Listener) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		panic(err)
	}
	ends := [2]net.Conn{}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "port")
		if ends[i], err = net.FileConn(f); err != nil {
			panic(err)
		}
		f.Close()
	}
	var mu sync.Mutex
	var host net.Conn
	go func() { // guest to host; with no host the bytes are lost
		buf := make([]byte, 64<<10)
		for {
			n, err := ends[0].Read(buf)
			if err != nil {
				panic(err)
			}
			g.gate()
			mu.Lock()
			h := host
			mu.Unlock()
			if h != nil {
				_, _ = h.Write(buf[:n])
			}
		}
	}()
	go g.agent(ends[1])
	for {
		conn, err := ln.Accept()
		if err != nil {
			panic(err)
		}
		mu.Lock()
		host = conn
		mu.Unlock()
		buf := make([]byte, 64<<10)
		for {
			n, err := conn.Read(buf)
			if n > 0 {
				g.gate()
				if _, err := ends[0].Write(buf[:n]); err != nil {
					panic(err)
				}
			}
			if err != nil {
				break
			}
		}
		mu.Lock()
		host = nil
		mu.Unlock()
		conn.Close()
	}
}

func (g *guest) agent(port net.Conn) {
	g.gate()
	for has(g.cfg.Dir, "boot-waits") {
		time.Sleep(5 * time.Millisecond)
	}
	magic, err := link.ParseMagic(strings.TrimPrefix(g.cfg.Cmdline, "quiet holdpoint.magic="))
	if err != nil {
		panic(err)
	}
	mux := http.NewServeMux()
	mux.Handle(agentv1connect.NewAgentServiceHandler(g))
	panic(link.Serve(context.Background(), link.NewGuest(port, magic), link.ServeConfig{Handler: mux}))
}

func (g *guest) Ping(context.Context, *connect.Request[agentv1.PingRequest]) (*connect.Response[agentv1.PingResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.off {
		g.exit(machine.GuestShutdown)
	}
	return connect.NewResponse(&agentv1.PingResponse{
		BootId: g.cfg.RunID, Configured: g.configured != nil, UnixNano: time.Now().Add(-g.behind).UnixNano(),
	}), nil
}

func (g *guest) StepClock(_ context.Context, req *connect.Request[agentv1.StepClockRequest]) (*connect.Response[agentv1.StepClockResponse], error) {
	if has(g.cfg.Dir, "clock-fails") {
		return nil, connect.NewError(connect.CodeUnknown, errors.New("the clock is broken"))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.behind -= time.Duration(req.Msg.GetDeltaNano())
	event(g.cfg.Dir, "step clock %s", time.Duration(req.Msg.GetDeltaNano()).Round(100*time.Millisecond))
	return connect.NewResponse(&agentv1.StepClockResponse{}), nil
}

func (g *guest) Continue(_ context.Context, req *connect.Request[agentv1.ContinueRequest]) (*connect.Response[agentv1.ContinueResponse], error) {
	if has(g.cfg.Dir, "continue-fails") {
		return nil, connect.NewError(connect.CodeUnknown, errors.New("no entropy device"))
	}
	event(g.cfg.Dir, "continue %s entropy=%d", req.Msg.GetHostname(), len(req.Msg.GetEntropy()))
	return connect.NewResponse(&agentv1.ContinueResponse{ClosedSockets: 3}), nil
}

func (g *guest) Configure(_ context.Context, req *connect.Request[agentv1.ConfigureRequest]) (*connect.Response[agentv1.ConfigureResponse], error) {
	if has(g.cfg.Dir, "configure-fails") {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("no tmpfs there"))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.configured = req.Msg
	event(g.cfg.Dir, "configure %s %s entropy=%d", req.Msg.GetHostname(), req.Msg.GetOnBoot(), len(req.Msg.GetEntropy()))
	return connect.NewResponse(&agentv1.ConfigureResponse{}), nil
}

// Exec tells its process id and the live disk, and echoes.
func (g *guest) Exec(_ context.Context, stream *connect.BidiStream[agentv1.ExecRequest, agentv1.ExecResponse]) error {
	for {
		req, err := stream.Receive()
		if err != nil {
			return nil
		}
		out := &agentv1.ExecResponse{}
		switch m := req.GetMessage().(type) {
		case *agentv1.ExecRequest_Start:
			g.mu.Lock()
			disk := strings.Join(g.disk, ",")
			g.mu.Unlock()
			out.Message = &agentv1.ExecResponse_Started{Started: &agentv1.ExecStarted{CommandId: disk, Pid: int32(os.Getpid())}}
		case *agentv1.ExecRequest_Stdin:
			out.Message = &agentv1.ExecResponse_Stdout{Stdout: m.Stdin}
		case *agentv1.ExecRequest_StdinEnd:
			return stream.Send(&agentv1.ExecResponse{Message: &agentv1.ExecResponse_Exit{Exit: &agentv1.ExecExit{Code: 7}}})
		}
		if err := stream.Send(out); err != nil {
			return nil
		}
	}
}

func (g *guest) Upload(_ context.Context, stream *connect.ClientStream[agentv1.UploadRequest]) (*connect.Response[agentv1.UploadResponse], error) {
	var n uint64
	for stream.Receive() {
		n += uint64(len(stream.Msg().GetData()))
	}
	return connect.NewResponse(&agentv1.UploadResponse{Bytes: n}), stream.Err()
}

// Download sends as many zeros as the path says.
func (g *guest) Download(_ context.Context, req *connect.Request[agentv1.DownloadRequest], stream *connect.ServerStream[agentv1.DownloadResponse]) error {
	var n int
	if _, err := fmt.Sscan(req.Msg.GetPath(), &n); err != nil {
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("no such file: %s", req.Msg.GetPath()))
	}
	buf := make([]byte, 256<<10)
	for ; n > 0; n -= len(buf) {
		if err := stream.Send(&agentv1.DownloadResponse{Data: buf[:min(n, len(buf))]}); err != nil {
			return err
		}
	}
	return nil
}

func (g *guest) Shutdown(ctx context.Context, _ *connect.Request[agentv1.ShutdownRequest]) (*connect.Response[agentv1.ShutdownResponse], error) {
	event(g.cfg.Dir, "asked to shut down")
	mode, _ := os.ReadFile(filepath.Join(g.cfg.Dir, "shutdown-mode"))
	switch string(mode) {
	case "refuse":
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("a file system is busy"))
	case "hang":
		<-ctx.Done()
		return nil, ctx.Err()
	case "dirty":
		g.exit(machine.GuestShutdown)
	case "reset":
		g.exit(machine.GuestReset)
	case "stay":
		return connect.NewResponse(&agentv1.ShutdownResponse{}), nil
	}
	g.mu.Lock()
	g.off = true
	g.mu.Unlock()
	return connect.NewResponse(&agentv1.ShutdownResponse{}), nil
}
