// Package machines has the verbs of a machine as a whole: run, ls, inspect,
// stats, start, stop, pause, resume, suspend, rename and rm.
package machines

import (
	"context"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

type runOptions struct {
	image  string
	memory string
	cpus   uint32
	// noCPUs is a cpus of 0 that was given.
	noCPUs   bool
	diskSize string
	// diskFormat is qcow2 or raw.
	diskFormat string
	onBoot     string
	init       string
	// noOnBoot is an empty onBoot that was given.
	noOnBoot bool
	tmpfs    []string
	network  string
	// allow and allowHost are the lists of the network.
	allow     []string
	allowHost []int
	boot      bool
	// suspendAfter is 0 for never.
	suspendAfter time.Duration
	remove       bool
	restart      string
	cpuLimit     float64
	memoryLimit  string
}

// runHelp is the help of run.
const runHelp = `Create a machine from an image, start it, and wait until it answers. Without NAME
one is made.

The first machine of an image and a size boots, and its boot is kept; later ones
continue from there, each with an identity, entropy and a clock of its own, and boot
where that is not possible. --boot always boots.

With --suspend-after a machine that is not used for that long is suspended: no
command of holdpoint's runs in it, nothing comes to it, and its CPUs are idle. A
detached command counts as use, what --on-boot has started does not. The next exec,
shell, copy, or request to a URL of it resumes it and waits for it.

With --disk-format raw the disk is one file, copied from the image, that other tools
can read while the machine is stopped; "inspect" says where it is, which is elsewhere
after a restore. It boots, and has stopped disk checkpoints only: there is no full
checkpoint of it, no suspend, and no fork while it runs.

With --init system the guest belongs to the init of its disk, systemd, and holdpoint's
agent lives on beside it: services, timers, the journal and users' sessions are as on
any machine, "stop" and stopped checkpoints shut down through it, and --on-boot is
run as the service holdpoint-on-boot once the system is up. The machine answers before
that: "systemctl is-system-running --wait" waits. The image debian-systemd is for that.

With --restart always the machine is started by itself whenever it has stopped and
nobody asked for that with "holdpoint stop": when its kernel crashed or it powered
itself off, and after a restart of the host, when the daemon starts, two at a time.
One that keeps failing is tried again after 1 s, 2 s, 4 s, and so on up to 5 min, and
"ls" and "inspect" say why. "holdpoint start" makes one that was stopped count again;
a suspended one stays suspended. Forks of the machine have the setting, too.

With --cpu-limit and --memory-limit the kernel of the host holds the machine's process
to that: it gets no more CPU time, and is killed when it needs more memory, which
therefore has to be 128 MiB more than the machine's at the least, and where the CPU is
emulated some 1.2 GiB more, for the code that is made. That needs cgroup v2
and a group of holdpoint's own, as the systemd units give it; "doctor" says whether it
is there, and without it such a machine is refused. While it runs systemd cannot start
that unit once more, whose group has groups in it: stop or suspend the machine first.

With --rm the machine goes, with its disk and its checkpoints, when it stops, for
whatever reason.

The machine resolves names and connects, by TCP and UDP, to public addresses; with
--network open to private ones, too; with --network none it has no network device.
Addresses of the host, loopback, link-local, multicast and broadcast ones, those of
metadata services, and blocks that are reserved or for documentation are always
refused, at once. With --allow-host PORT that port of the host's loopback is at
host.holdpoint.internal, such as a proxy that programs are told of by http_proxy.
With --allow only what is listed can be reached, and only listed names are resolved.
"logs --network" tells what was refused. The setting is a part of the machine and of
its checkpoints.`

// NewRun is the verb `run`.
func NewRun(a *app.App) *cobra.Command {
	var o runOptions
	var cmd *cobra.Command
	cmd = a.Command(app.Verb{
		Use: "run [NAME] --image IMAGE [flags]", Short: "Create a machine and start it",
		Long: runHelp,
		Example: `  holdpoint run web --image debian --on-boot nginx
  holdpoint run --image debian --memory 1G --cpus 4 --disk-size 16G
  holdpoint run sleepy --image debian --suspend-after 10m
  holdpoint run builder --image debian --allow deb.debian.org --allow pypi.org:443`,
		MaxArgs: 1, Effect: true, Cancels: true, Object: view.MachineDone{},
		Kinds: []errdefs.Kind{
			errdefs.NotFound, errdefs.AlreadyExists, errdefs.RequestIDConflict, errdefs.WrongState, errdefs.Unsupported,
			errdefs.Incompatible, errdefs.NoSpace, errdefs.Storage, errdefs.Deadline,
		},
		Run: func(ctx context.Context, args []string) error {
			o.noCPUs = o.cpus == 0 && cmd.Flags().Changed("cpus")
			o.noOnBoot = o.onBoot == "" && cmd.Flags().Changed("on-boot")
			return runRun(ctx, a, args, o)
		},
	})
	f := cmd.Flags()
	f.StringVar(&o.image, "image", "", "image to start from; needed")
	f.StringVar(&o.memory, "memory", "", "memory, 128M to 16G (default 512M)")
	f.Uint32Var(&o.cpus, "cpus", 0, "virtual CPUs, 1 to 8 (default 2)")
	f.StringVar(&o.diskSize, "disk-size", "", "size of the disk (default the image's)")
	f.StringVar(&o.diskFormat, "disk-format", machine.QcowDisk, "`FORMAT` of the disk: qcow2, or raw")
	f.StringVar(&o.onBoot, "on-boot", "", "shell command that runs at every boot (default the image's, if it has one; empty for none)")
	f.StringVar(&o.init, "init", "", "`WHO` is process 1: agent, or system for the disk's own init, systemd (default the image's)")
	f.StringArrayVar(&o.tmpfs, "tmpfs", nil, "path that is kept in memory and in no checkpoint; may be given again")
	f.BoolVar(&o.boot, "boot", false, "boot, also where the image's kept boot could be continued")
	f.BoolVar(&o.remove, "rm", false, "remove the machine, its disk and its checkpoints when it stops")
	f.Float64Var(&o.cpuLimit, "cpu-limit", 0, "CPU time its process may use, in CPUs, such as 1.5 (default no limit)")
	f.StringVar(&o.memoryLimit, "memory-limit", "", "memory of the host that its process may use (default no limit)")
	f.StringVar(&o.restart, "restart", "no", "`WHEN`: no, or always: start it again when it has stopped by itself")
	f.DurationVar(&o.suspendAfter, "suspend-after", 0, "suspend the machine when it was idle for this long, such as 10m (default never)")
	o.networkFlags(f)
	a.CompleteFlag(cmd, "image", a.ImageNames)
	a.CompleteFlag(cmd, "disk-format", app.Words(machine.QcowDisk, machine.RawDisk))
	a.CompleteFlag(cmd, "init", app.Words(machine.InitAgent, machine.InitSystem))
	return cmd
}

func (o *runOptions) networkFlags(f *pflag.FlagSet) {
	f.StringVar(&o.network, "network", "internet", "`MODE`: none, internet (public addresses) or open (private ones, too)")
	f.StringArrayVar(&o.allow, "allow", nil, "`HOST[:PORT]` that can be reached; with it, nothing else can; may be given again")
	f.IntSliceVar(&o.allowHost, "allow-host", nil, "`PORT` of the host that can be reached, at host.holdpoint.internal; may be given again")
}

func runRun(ctx context.Context, a *app.App, args []string, o runOptions) error {
	if o.image == "" {
		return errdefs.New(errdefs.Invalid, "run: which image? give --image; `holdpoint image ls` lists them, `holdpoint image build debian` makes one")
	}
	if least := machine.MinSuspendAfter * time.Millisecond; o.suspendAfter != 0 && o.suspendAfter < least {
		return errdefs.New(errdefs.Invalid, "run: --suspend-after %s is too short: give %s or more, or 0 for never", o.suspendAfter, least)
	}
	spec, err := o.spec()
	if err != nil {
		return err
	}
	req := &holdpointv1.RunMachineRequest{RequestId: a.RequestID(), Image: o.image, Spec: spec, Boot: o.boot, NoOnBoot: o.noOnBoot, RemoveOnStop: o.remove}
	if len(args) > 0 {
		req.Name = args[0]
	}
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, true, c.Machines.Run, req)
		if err != nil {
			return err
		}
		return printMachine(a, op, func(w io.Writer, m *holdpointv1.Machine) error {
			return view.Fields(w, [][2]string{
				{"machine", m.GetName()},
				{"state", m.GetState()},
				{"image", m.GetImage()},
				{"memory", view.Size(m.GetSpec().GetMemoryBytes())},
				{"shell", "holdpoint shell " + m.GetName()},
			})
		})
	})
}

// spec is what the machine is asked to be; zero where the daemon is to say.
func (o *runOptions) spec() (*holdpointv1.Spec, error) {
	spec := &holdpointv1.Spec{
		Cpus: o.cpus, DiskFormat: o.diskFormat, Init: o.init, OnBoot: o.onBoot, Tmpfs: o.tmpfs, Network: o.network, NetworkAllow: o.allow, SuspendAfterMillis: o.suspendAfter.Milliseconds(),
		Restart: o.restart,
	}
	if o.noCPUs {
		return nil, errdefs.New(errdefs.Invalid, "run: --cpus 0: a machine has 1 to %d; leave it out for %d", machine.MaxCPUs, machine.DefaultCPUs)
	}
	for _, port := range o.allowHost {
		if port < 1 || port > math.MaxUint16 {
			return nil, errdefs.New(errdefs.Invalid, "run: --allow-host %d: give a port from 1 to %d", port, math.MaxUint16)
		}
		spec.NetworkAllowHost = append(spec.NetworkAllowHost, uint32(port))
	}
	// Beyond a uint32 there is no such host; NaN is no number that fits either.
	if limit := math.Round(o.cpuLimit * 1000); !(limit >= 0 && limit < 1<<31) || limit == 0 && o.cpuLimit != 0 {
		return nil, errdefs.New(errdefs.Invalid, "run: --cpu-limit %v: give a number of CPUs, 0.01 or more", o.cpuLimit)
	} else {
		spec.CpuLimitMillis = uint32(limit)
	}
	for _, size := range []struct {
		flag, text string
		bytes      *int64
	}{
		{"memory-limit", o.memoryLimit, &spec.MemoryLimitBytes},
		{"memory", o.memory, &spec.MemoryBytes},
		{"disk-size", o.diskSize, &spec.DiskBytes},
	} {
		if size.text == "" {
			continue
		}
		n, err := view.ParseSize(size.text)
		if err != nil {
			return nil, fmt.Errorf("run: --%s: %w", size.flag, err)
		}
		*size.bytes = n
	}
	return spec, nil
}

// printMachine prints an operation on a machine that is done.
func printMachine(a *app.App, op *client.Operation, human func(io.Writer, *holdpointv1.Machine) error) error {
	m, notes := op.GetResult().GetMachine(), op.GetResult().GetNotes()
	a.Note(notes)
	o := app.Output{
		Object: view.MachineDone{
			Header: view.NewHeader(), Machine: view.MachineOf(m), Operation: op.GetId(), Notes: view.Notes(notes),
		},
		Terse: []string{m.GetName()},
	}
	if human != nil {
		o.Human = func(w io.Writer) error { return human(w, m) }
	}
	return a.Print(o)
}
