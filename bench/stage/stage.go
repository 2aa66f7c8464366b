//go:build linux

// Package stage is a daemon in a home of its own, for the benchmark to measure,
// and what it is asked to do most. It measures nothing but the phases of operations.
package stage

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
	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// Stage is a daemon in a home of its own. Its life: New copies the home
// with the image and starts the daemon; Close ends every machine and the
// daemon, and removes the home.
type Stage struct {
	Home   *home.Home
	Client *client.Client
	// Log is told what takes long.
	Log io.Writer
	bin string

	// Web is the machine most measurements share, once it was booted, and
	// WebSteps is how that boot went.
	Web      *holdpointv1.Machine
	WebSteps []Step
}

// New begins a stage with a copy of the home template, measuring the binary bin.
func New(ctx context.Context, bin, template string, log io.Writer) (*Stage, error) {
	dir, err := os.MkdirTemp("/tmp", "hpbench.")
	if err != nil {
		return nil, err
	}
	s := &Stage{bin: bin, Log: log}
	if s.Home, err = home.Open(dir); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	// cp knows reflinks and keeps holes, owners and modes.
	if out, err := exec.CommandContext(ctx, "cp", "-a", "--reflink=auto", "--sparse=always", template+"/.", dir).CombinedOutput(); err != nil {
		return nil, errors.Join(fmt.Errorf("copy home %s: %w: %s", template, err, out), os.RemoveAll(dir))
	}
	if _, err := s.CLI(ctx, "daemon", "start"); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	if s.Client, err = client.Dial(ctx, client.Options{Home: dir}); err != nil {
		return nil, errors.Join(err, s.Close(ctx))
	}
	return s, nil
}

// Close works without the run's own cancellation.
func (s *Stage) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	var errs []error
	if s.Client != nil {
		list, err := s.Client.Machines.List(ctx, connect.NewRequest(&holdpointv1.ListMachinesRequest{}))
		errs = append(errs, err)
		if err == nil {
			for _, m := range list.Msg.GetMachines() {
				errs = append(errs, s.Remove(ctx, m.GetName()))
			}
		}
		s.Client.Close()
	}
	_, err := s.CLI(ctx, "daemon", "stop")
	return errors.Join(append(errs, err, os.RemoveAll(s.Home.Dir()))...)
}

// Command is the command line with args, in this stage's home.
func (s *Stage) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, s.bin, args...)
	cmd.Env = append(os.Environ(), "HOLDPOINT_HOME="+s.Home.Dir())
	return cmd
}

// CLI runs the command line and gives what it printed.
func (s *Stage) CLI(ctx context.Context, args ...string) (string, error) {
	out, err := s.Command(ctx, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("holdpoint %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

// Phase is how long an operation was in one phase.
type Phase struct {
	Name string
	Took time.Duration
}

// Step is when an operation was seen to enter a phase.
type Step struct {
	Name string
	At   time.Time
}

// Operate runs a request to its end and returns its result and phases.
func (s *Stage) Operate(ctx context.Context, call func(context.Context) (*connect.Response[client.Operation], error)) (*client.Operation, []Step, error) {
	steps := []Step{{"admission", time.Now()}}
	op, err := s.Client.Admit(ctx, call)
	if err != nil {
		return nil, nil, err
	}
	op, err = s.Client.WaitOperation(ctx, op.GetId(), func(op *client.Operation) {
		if name := op.GetPhase(); name != "" && name != steps[len(steps)-1].Name {
			steps = append(steps, Step{name, time.Now()})
		}
	})
	return op, append(steps, Step{"end", time.Now()}), err
}

// Phases are the times between steps.
func Phases(steps []Step) []Phase {
	var out []Phase
	for i := 1; i < len(steps); i++ {
		out = append(out, Phase{steps[i-1].Name, steps[i].At.Sub(steps[i-1].At)})
	}
	return out
}

// ListPhases are phases as text.
func ListPhases(ps []Phase) string {
	var parts []string
	for _, p := range ps {
		parts = append(parts, p.Name+" "+table.MS(p.Took))
	}
	return strings.Join(parts, ", ")
}

// Machine creates and boots a machine.
func (s *Stage) Machine(ctx context.Context, name, image string, spec *holdpointv1.Spec) (*holdpointv1.Machine, []Step, error) {
	fmt.Fprintf(s.Log, "booting %s …\n", name)
	op, steps, err := s.Operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return s.Client.Machines.Run(ctx, connect.NewRequest(&holdpointv1.RunMachineRequest{
			RequestId: client.NewRequestID(), Name: name, Image: image, Spec: spec,
		}))
	})
	if err != nil {
		return nil, nil, fmt.Errorf("run machine %q: %w", name, err)
	}
	return op.GetResult().GetMachine(), steps, nil
}

// Shared is a running machine for all that need no machine of their own.
func (s *Stage) Shared(ctx context.Context) (*holdpointv1.Machine, error) {
	var err error
	if s.Web == nil {
		s.Web, s.WebSteps, err = s.Machine(ctx, "web", "debian", &holdpointv1.Spec{OnBoot: "nginx"})
	}
	return s.Web, err
}

// Remove ends and removes a machine.
func (s *Stage) Remove(ctx context.Context, name string) error {
	_, _, err := s.Operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return s.Client.Machines.Remove(ctx, connect.NewRequest(&holdpointv1.RemoveMachineRequest{
			RequestId: client.NewRequestID(), Machine: name, Force: true,
		}))
	})
	return err
}

// Exec runs a command in a machine through the API and returns its output.
func (s *Stage) Exec(ctx context.Context, name string, argv ...string) (string, error) {
	return s.Guest(ctx, name).Exec(&agentv1.ExecStart{Argv: argv}, nil)
}

// Monitor connects to the monitor of a machine's run.
func (s *Stage) Monitor(ctx context.Context, m *holdpointv1.Machine) (*monitor.Client, error) {
	return monitor.Connect(ctx, s.Home.Run(m.GetRunId()))
}

// Image gives the folder of the one image in the home.
func (s *Stage) Image() (string, error) {
	found, err := filepath.Glob(filepath.Join(s.Home.Images(), "*", "manifest.json"))
	if err != nil || len(found) == 0 {
		return "", fmt.Errorf("find an image below %s: run make image", s.Home.Images())
	}
	return filepath.Dir(found[len(found)-1]), nil
}
