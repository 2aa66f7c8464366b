//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// stage is a daemon in a home of its own. Its life: newStage copies the home
// with the image and starts the daemon; close ends every machine and the
// daemon, and removes the home.
type stage struct {
	bin    string
	home   *home.Home
	client *client.Client
	log    io.Writer

	// web is the machine most measurements share, once it was booted, and
	// webSteps is how that boot went.
	web      *holdpointv1.Machine
	webSteps []step
}

func newStage(ctx context.Context, bin, template string, log io.Writer) (*stage, error) {
	dir, err := os.MkdirTemp("/tmp", "hpbench.")
	if err != nil {
		return nil, err
	}
	s := &stage{bin: bin, log: log}
	if s.home, err = home.Open(dir); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	// cp knows reflinks and keeps holes, owners and modes.
	if out, err := exec.CommandContext(ctx, "cp", "-a", "--reflink=auto", "--sparse=always", template+"/.", dir).CombinedOutput(); err != nil {
		return nil, errors.Join(fmt.Errorf("copy home %s: %w: %s", template, err, out), os.RemoveAll(dir))
	}
	if _, err := s.cli(ctx, "daemon", "start"); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	if s.client, err = client.Dial(ctx, client.Options{Home: dir}); err != nil {
		return nil, errors.Join(err, s.close(ctx))
	}
	return s, nil
}

// close works without the run's own cancellation.
func (s *stage) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	var errs []error
	if s.client != nil {
		list, err := s.client.Machines.List(ctx, connect.NewRequest(&holdpointv1.ListMachinesRequest{}))
		errs = append(errs, err)
		if err == nil {
			for _, m := range list.Msg.GetMachines() {
				errs = append(errs, s.remove(ctx, m.GetName()))
			}
		}
		s.client.Close()
	}
	_, err := s.cli(ctx, "daemon", "stop")
	return errors.Join(append(errs, err, os.RemoveAll(s.home.Dir()))...)
}

// command is the command line with args, in this stage's home.
func (s *stage) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, s.bin, args...)
	cmd.Env = append(os.Environ(), "HOLDPOINT_HOME="+s.home.Dir())
	return cmd
}

func (s *stage) cli(ctx context.Context, args ...string) (string, error) {
	out, err := s.command(ctx, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("holdpoint %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

// phase is how long an operation was in one phase.
type phase struct {
	name string
	took time.Duration
}

// step is when an operation was seen to enter a phase.
type step struct {
	name string
	at   time.Time
}

// operate runs a request to its end and returns its result and phases.
func (s *stage) operate(ctx context.Context, call func(context.Context) (*connect.Response[client.Operation], error)) (*client.Operation, []step, error) {
	steps := []step{{"admission", time.Now()}}
	op, err := s.client.Admit(ctx, call)
	if err != nil {
		return nil, nil, err
	}
	op, err = s.client.WaitOperation(ctx, op.GetId(), func(op *client.Operation) {
		if name := op.GetPhase(); name != "" && name != steps[len(steps)-1].name {
			steps = append(steps, step{name, time.Now()})
		}
	})
	return op, append(steps, step{"end", time.Now()}), err
}

func phases(steps []step) []phase {
	var out []phase
	for i := 1; i < len(steps); i++ {
		out = append(out, phase{steps[i-1].name, steps[i].at.Sub(steps[i-1].at)})
	}
	return out
}

func listPhases(ps []phase) string {
	var parts []string
	for _, p := range ps {
		parts = append(parts, p.name+" "+ms(p.took))
	}
	return strings.Join(parts, ", ")
}

// machine creates and boots a machine.
func (s *stage) machine(ctx context.Context, name, image string, spec *holdpointv1.Spec) (*holdpointv1.Machine, []step, error) {
	fmt.Fprintf(s.log, "booting %s …\n", name)
	op, steps, err := s.operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return s.client.Machines.Run(ctx, connect.NewRequest(&holdpointv1.RunMachineRequest{
			RequestId: client.NewRequestID(), Name: name, Image: image, Spec: spec,
		}))
	})
	if err != nil {
		return nil, nil, fmt.Errorf("run machine %q: %w", name, err)
	}
	return op.GetResult().GetMachine(), steps, nil
}

// shared is a running machine for all that need no machine of their own.
func (s *stage) shared(ctx context.Context) (*holdpointv1.Machine, error) {
	var err error
	if s.web == nil {
		s.web, s.webSteps, err = s.machine(ctx, "web", "debian", &holdpointv1.Spec{OnBoot: "nginx"})
	}
	return s.web, err
}

func (s *stage) remove(ctx context.Context, name string) error {
	_, _, err := s.operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return s.client.Machines.Remove(ctx, connect.NewRequest(&holdpointv1.RemoveMachineRequest{
			RequestId: client.NewRequestID(), Machine: name, Force: true,
		}))
	})
	return err
}

// exec runs a command in a machine through the API and returns its output.
func (s *stage) exec(ctx context.Context, name string, argv ...string) (string, error) {
	stream := s.client.Guest.Exec(ctx)
	defer func() { _ = stream.CloseResponse() }()
	start := &agentv1.ExecRequest{Message: &agentv1.ExecRequest_Start{Start: &agentv1.ExecStart{Argv: argv}}}
	if err := stream.Send(&holdpointv1.GuestExecRequest{Machine: name, Message: start}); err != nil && !errors.Is(err, io.EOF) {
		return "", err
	}
	end := &agentv1.ExecRequest{Message: &agentv1.ExecRequest_StdinEnd{StdinEnd: &agentv1.StdinEnd{}}}
	if err := stream.Send(&holdpointv1.GuestExecRequest{Message: end}); err != nil && !errors.Is(err, io.EOF) {
		return "", err
	}
	var out strings.Builder
	for {
		msg, err := stream.Receive()
		if err != nil {
			return "", fmt.Errorf("exec %q: %w", argv, err)
		}
		switch m := msg.GetMessage().GetMessage().(type) {
		case *agentv1.ExecResponse_Stdout:
			out.Write(m.Stdout)
		case *agentv1.ExecResponse_Stderr:
			out.Write(m.Stderr)
		case *agentv1.ExecResponse_Exit:
			if m.Exit.GetCode() != 0 {
				return "", fmt.Errorf("exec %q: exit code %d: %s%s", argv, m.Exit.GetCode(), out.String(), m.Exit.GetError())
			}
			return out.String(), stream.CloseRequest()
		}
	}
}

// monitor connects to the monitor of a machine's run.
func (s *stage) monitor(ctx context.Context, m *holdpointv1.Machine) (*monitor.Client, error) {
	return monitor.Connect(ctx, s.home.Run(m.GetRunId()))
}

// image gives the folder of the one image in the home.
func (s *stage) image() (string, error) {
	found, err := filepath.Glob(filepath.Join(s.home.Images(), "*", "manifest.json"))
	if err != nil || len(found) == 0 {
		return "", fmt.Errorf("find an image below %s: run make image", s.home.Images())
	}
	return filepath.Dir(found[len(found)-1]), nil
}
