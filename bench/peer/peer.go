//go:build linux

// Package peer is what holdpoint is compared with: stock QEMU with the same
// guest, the same devices and a plain qcow2 disk, which keeps and restores
// machines by its own snapshots, and libvirt where it is installed. Nothing of
// holdpoint's stands between but the guest agent, which says when the guest
// answers.
package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/bench/talk"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
	"github.com/holdpoint/holdpoint/internal/network"
	"github.com/holdpoint/holdpoint/internal/qemu/argv"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
	"github.com/holdpoint/holdpoint/internal/qmp"
)

// bootLimit is how long a guest may take to boot.
const bootLimit = 2 * time.Minute

// Config says what machine it is.
type Config struct {
	// Dir is a folder for all of its files, short enough for sockets.
	Dir   string
	Image image.Image
	// Initramfs is that of image.Image.BootInitramfs.
	Initramfs    string
	Capabilities host.Capabilities
	Accelerator  string
	MemoryBytes  int64
	CPUs         int
	// NIC gives the guest a network device, on QEMU's own user network.
	NIC bool
}

// HostAddress is what a guest on QEMU's own user network reaches the host's
// loopback at.
const HostAddress = "10.0.2.2"

// Peer is a machine of QEMU's. Its life: New makes its disk; Boot or LoadVM
// starts a process and End ends it, in turns; Close removes all.
type Peer struct {
	cfg   Config
	magic link.Magic

	cmd     *exec.Cmd
	printed *os.File
	qmp     *qmp.Client
	events  *qmp.Subscription
	talking *relay.Conversation
}

// Started says how long a start took.
type Started struct {
	// Running is until QEMU says that the guest runs, Reply until it answers.
	Running, Reply time.Duration
}

// New makes the disk of a machine: a copy of the image's as qcow2, with room
// for snapshots.
func New(ctx context.Context, cfg Config) (*Peer, error) {
	p := &Peer{cfg: cfg, magic: link.NewMagic()}
	out, err := exec.CommandContext(ctx, "qemu-img", "convert", "-O", "qcow2", cfg.Image.Root(), p.disk()).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("make the disk of the bare QEMU: %w: %s", err, out)
	}
	return p, nil
}

func (p *Peer) path(name string) string { return filepath.Join(p.cfg.Dir, name) }

func (p *Peer) disk() string { return p.path("disk.qcow2") }

// cmdline is the kernel's, without the console.
func (p *Peer) cmdline() string {
	return "holdpoint.magic=" + p.magic.String() + " holdpoint.root=/dev/vda"
}

// arguments are those of a machine of holdpoint's, but for the memory, which is
// anonymous, the disk, and how the process is reached.
func (p *Peer) arguments() []string {
	caps := p.cfg.Capabilities
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none",
		"-accel", p.cfg.Accelerator, "-M", caps.MachineType + host.MachineOptions, "-cpu", caps.CPU(p.cfg.Accelerator),
		"-smp", strconv.Itoa(p.cfg.CPUs), "-m", fmt.Sprintf("%dM", p.cfg.MemoryBytes>>20),
		"-qmp", "unix:" + p.path("qmp") + ",server=on,wait=off",
		"-chardev", "socket,id=link,server=on,wait=off,path=" + p.path("link"),
		"-chardev", "file,id=console,append=on,path=" + p.path("console"), "-serial", "chardev:console",
		"-object", "rng-random,id=entropy,filename=/dev/urandom",
		"-blockdev", "driver=qcow2,node-name=disk,file.driver=file,file.filename=" + p.disk(),
		"-kernel", p.cfg.Image.Kernel(), "-initrd", p.cfg.Initramfs,
		"-append", p.cmdline() + " console=ttyS0 cryptomgr.notests rcupdate.rcu_expedited=1 panic=-1",
	}
	if p.cfg.NIC {
		args = append(args, "-netdev", "user,id=network")
	}
	for _, d := range p.devices() {
		args = append(args, "-device", d)
	}
	return args
}

// devices are those that a machine of holdpoint's has, at their addresses.
func (p *Peer) devices() []string {
	platform := argv.Platform(p.cfg.Capabilities, machine.RunConfig{
		Accelerator: p.cfg.Accelerator, MemoryBytes: p.cfg.MemoryBytes, CPUs: p.cfg.CPUs,
		NIC: p.cfg.NIC,
	})
	var devices []string
	for _, d := range platform.Devices {
		if !strings.HasPrefix(d, "{") {
			continue
		}
		if strings.Contains(d, `"virtio-blk-pci"`) {
			d = strings.Replace(d, "{", `{"drive":"disk",`, 1)
		}
		devices = append(devices, d)
	}
	return devices
}

// Boot starts the guest from its disk.
func (p *Peer) Boot(ctx context.Context) (Started, error) {
	s, err := p.start(ctx)
	if err != nil {
		return Started{}, err
	}
	told := &agentv1.ConfigureRequest{Hostname: "peer", MachineId: strings.Repeat("ab", 16)}
	if p.cfg.NIC {
		told.Network = &agentv1.NetworkDevice{Mac: network.GuestMAC, Addresses: []string{"10.0.2.15/24"}, Gateways: []string{HostAddress}}
	}
	return s, p.talking.Configure(ctx, told)
}

// LoadVM starts a new process that goes on from a snapshot.
func (p *Peer) LoadVM(ctx context.Context, tag string) (Started, error) {
	return p.start(ctx, "-loadvm", tag)
}

func (p *Peer) start(ctx context.Context, more ...string) (s Started, err error) {
	if p.printed, err = os.Create(p.path("printed")); err != nil {
		return s, err
	}
	p.cmd = exec.Command(p.cfg.Capabilities.Binary, append(p.arguments(), more...)...)
	p.cmd.Stdout, p.cmd.Stderr = p.printed, p.printed
	begin := time.Now()
	if err := p.cmd.Start(); err != nil {
		return s, errors.Join(fmt.Errorf("start the bare QEMU: %w", err), p.printed.Close())
	}
	defer func() {
		if err != nil {
			said, _ := os.ReadFile(p.path("printed"))
			err = errors.Join(fmt.Errorf("start the bare QEMU: %w: %s", err, said), p.End())
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, bootLimit)
	defer cancel()
	p.events = qmp.NewSubscription("STOP", "RESUME")
	if err := p.awaitSocket(ctx); err != nil {
		return s, err
	}
	if p.qmp, err = qmp.Dial(ctx, p.path("qmp"), p.events); err != nil {
		return s, err
	}
	if err := p.awaitRunning(ctx); err != nil {
		return s, err
	}
	s.Running = time.Since(begin)
	guest := relay.Guest{Magic: p.magic}
	if p.talking, err = guest.Converse(ctx, p, bootLimit); err != nil {
		return s, err
	}
	_, err = p.talking.Agent().Ping(ctx, connect.NewRequest(&agentv1.PingRequest{}))
	s.Reply = time.Since(begin)
	return s, err
}

// DialLink connects to the agent link, for relay.
func (p *Peer) DialLink(ctx context.Context) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "unix", p.path("link"))
}

// poll lies between two looks at a process that has no event for it.
const poll = time.Millisecond

// awaitSocket waits until the process listens.
func (p *Peer) awaitSocket(ctx context.Context) error {
	for {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", p.path("link"))
		if err == nil {
			return conn.Close()
		}
		if err := pause(ctx); err != nil {
			return err
		}
	}
}

func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(poll):
		return nil
	}
}

// awaitRunning waits until the guest's CPUs run.
func (p *Peer) awaitRunning(ctx context.Context) error {
	for {
		var status struct {
			Running bool `json:"running"`
		}
		if err := p.qmp.Execute(ctx, "query-status", nil, &status); err != nil || status.Running {
			return err
		}
		if err := pause(ctx); err != nil {
			return err
		}
	}
}

// PID is the process.
func (p *Peer) PID() int64 { return int64(p.cmd.Process.Pid) }

// monitorCommand runs a command that only the monitor for people has, which
// says nothing when it is done.
func (p *Peer) monitorCommand(ctx context.Context, line string) (time.Duration, error) {
	var said string
	begin := time.Now()
	err := p.qmp.Execute(ctx, "human-monitor-command", map[string]string{"command-line": line}, &said)
	took := time.Since(begin)
	if err == nil && strings.TrimSpace(said) != "" {
		err = errors.New(strings.TrimSpace(said))
	}
	if err != nil {
		return 0, fmt.Errorf("bare QEMU: %s: %w", line, err)
	}
	return took, nil
}

// SaveVM keeps a snapshot, and says how long that took and how long the guest
// stood still in it, by QEMU's own events.
func (p *Peer) SaveVM(ctx context.Context, tag string) (took, stood time.Duration, err error) {
	if took, err = p.monitorCommand(ctx, "savevm "+tag); err != nil {
		return 0, 0, err
	}
	stop, err := p.events.Next(ctx)
	if err != nil {
		return 0, 0, err
	}
	resume, err := p.events.Next(ctx)
	if err != nil {
		return 0, 0, err
	}
	if stop.Name != "STOP" || resume.Name != "RESUME" {
		return 0, 0, fmt.Errorf("bare QEMU: savevm gave events %s and %s", stop.Name, resume.Name)
	}
	return took, resume.Time.Sub(stop.Time), nil
}

// LoadVMHere goes back to a snapshot in the same process, to running.
func (p *Peer) LoadVMHere(ctx context.Context, tag string) (time.Duration, error) {
	took, err := p.monitorCommand(ctx, "loadvm "+tag)
	for range 2 { // STOP and RESUME
		if err == nil {
			_, err = p.events.Next(ctx)
		}
	}
	return took, err
}

// DropVM removes a snapshot.
func (p *Peer) DropVM(ctx context.Context, tag string) error {
	_, err := p.monitorCommand(ctx, "delvm "+tag)
	return err
}

// StateBytes is what the snapshots take besides the disk.
func (p *Peer) StateBytes(ctx context.Context) (int64, error) {
	var nodes []struct {
		Name  string `json:"node-name"`
		Image struct {
			Snapshots []struct {
				Bytes int64 `json:"vm-state-size"`
			} `json:"snapshots"`
		} `json:"image"`
	}
	if err := p.qmp.Execute(ctx, "query-named-block-nodes", nil, &nodes); err != nil {
		return 0, err
	}
	var sum int64
	for _, n := range nodes {
		for _, s := range n.Image.Snapshots {
			if n.Name == "disk" {
				sum += s.Bytes
			}
		}
	}
	return sum, nil
}

// Guest is the guest, to talk to.
func (p *Peer) Guest(ctx context.Context) talk.Guest { return guest{ctx, p.talking} }

type guest struct {
	ctx     context.Context
	talking *relay.Conversation
}

func (g guest) Exec(start *agentv1.ExecStart, stdin []byte) (string, error) {
	return talk.Exec(g.talking.Agent().Exec(g.ctx), start, stdin)
}

func (g guest) Dial(port uint32) (*talk.Conn, error) {
	return talk.Connect(g.talking.Agent().Dial(g.ctx), port)
}

// End kills the process.
func (p *Peer) End() error {
	if p.cmd == nil {
		return nil
	}
	if p.talking != nil {
		p.talking.Close()
		p.talking = nil
	}
	if p.qmp != nil {
		_ = p.qmp.Close() // QEMU goes with it
		p.qmp = nil
	}
	err := p.cmd.Process.Kill()
	_ = p.cmd.Wait() // it was killed
	p.cmd = nil
	for _, name := range []string{"qmp", "link"} {
		if removed := os.Remove(p.path(name)); !errors.Is(removed, os.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}
	return errors.Join(err, p.printed.Close())
}

// Close ends it for good.
func (p *Peer) Close() error { return errors.Join(p.End(), os.RemoveAll(p.cfg.Dir)) }
