//go:build linux

package peer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"text/template"
	"time"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/bench/talk"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
)

// ErrNoLibvirt says that there is nothing to compare with here.
var ErrNoLibvirt = errors.New("libvirt cannot be measured here")

// libvirtScript begins libvirtd with all of its folders private, so that
// nothing of the host's own libvirt is seen or changed. $1 is a folder.
const libvirtScript = `set -e
for d in /etc/libvirt /var/lib/libvirt /var/cache /var/log /run; do mount -t tmpfs tmpfs $d; done
mkdir -p /run/libvirt /var/cache/libvirt /var/log/libvirt/qemu
cat >/etc/libvirt/qemu.conf <<END
stdio_handler = "file"
user = "root"
group = "root"
remember_owner = 0
security_driver = "none"
namespaces = []
cgroup_controllers = []
END
printf 'auth_unix_rw = "none"\nlog_outputs = "3:stderr"\n' >/etc/libvirt/libvirtd.conf
# Debian's driver looks the user up that its package libvirt-daemon-system makes.
for f in passwd group; do
	cp /etc/$f "$1/$f"
	grep -q ^libvirt-qemu: "$1/$f" || echo libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin >>"$1/$f"
	mount --bind "$1/$f" /etc/$f
done
exec libvirtd
`

// domain is the machine in libvirt's words; the CPU is given past them, so
// that it is the same to the feature.
const domain = `<domain type='{{.Accelerator}}' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>peer</name><memory unit='MiB'>{{.MiB}}</memory><vcpu>{{.CPUs}}</vcpu>
  <os><type arch='x86_64' machine='{{.Machine}}'>hvm</type><kernel>{{.Kernel}}</kernel><initrd>{{.Initramfs}}</initrd>
    <cmdline>{{.Cmdline}}</cmdline></os>
  <features><acpi/><apic/></features>
  <devices><emulator>{{.Binary}}</emulator>
    <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{{.Disk}}'/><target dev='vda' bus='virtio'/></disk>
    <channel type='unix'><source mode='bind' path='{{.Link}}'/><target type='virtio' name='holdpoint.agent'/></channel>
    <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
    <memballoon model='none'/>
  </devices>
  <qemu:commandline><qemu:arg value='-cpu'/><qemu:arg value='{{.CPU}}'/></qemu:commandline>
</domain>
`

// Libvirt is the same machine under libvirt. Its life: StartLibvirt boots it,
// Snapshot keeps it, Close ends it and its libvirtd.
type Libvirt struct {
	peer   *Peer
	daemon *exec.Cmd
	said   *os.File
	count  int
}

// StartLibvirt begins a libvirtd of its own and boots the machine in it; the
// error is ErrNoLibvirt where that is not possible.
func StartLibvirt(ctx context.Context, cfg Config) (l *Libvirt, err error) {
	for _, program := range []string{"libvirtd", "virsh", "unshare", "nsenter"} {
		if _, err := exec.LookPath(program); err != nil {
			return nil, fmt.Errorf("%w: %w (apt install libvirt-daemon libvirt-clients libvirt-daemon-driver-qemu)", ErrNoLibvirt, err)
		}
	}
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("%w: only root can give it folders of its own", ErrNoLibvirt)
	}
	l = &Libvirt{}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	if l.peer, err = New(ctx, cfg); err != nil {
		return l, err
	}
	if l.said, err = os.Create(l.peer.path("libvirtd.log")); err != nil {
		return l, err
	}
	l.daemon = exec.Command("unshare", "--mount", "sh", "-c", libvirtScript, "libvirtd", cfg.Dir)
	l.daemon.Stdout, l.daemon.Stderr = l.said, l.said
	if err := l.daemon.Start(); err != nil {
		l.daemon = nil
		return l, err
	}
	return l, l.boot(ctx)
}

func (l *Libvirt) boot(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, bootLimit)
	defer cancel()
	for {
		out, err := l.virsh(ctx, "version")
		if err == nil {
			break
		}
		if errors.Join(pause(ctx), ctx.Err()) != nil {
			said, _ := os.ReadFile(l.said.Name())
			return fmt.Errorf("start libvirtd: %w: %s %s", err, out, said)
		}
	}
	xml, err := l.domain()
	if err != nil {
		return err
	}
	for _, args := range [][]string{{"define", xml}, {"start", "peer"}} {
		if out, err := l.virsh(ctx, args...); err != nil {
			return fmt.Errorf("virsh %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	guest := relay.Guest{Magic: l.peer.magic}
	if l.peer.talking, err = guest.Converse(ctx, l.peer, bootLimit); err != nil {
		return err
	}
	return l.peer.talking.Configure(ctx, &agentv1.ConfigureRequest{Hostname: "peer", MachineId: strings.Repeat("ab", 16)})
}

// domain writes the file that defines the machine.
func (l *Libvirt) domain() (string, error) {
	p := l.peer
	accelerator := map[string]string{"tcg": "qemu"}[p.cfg.Accelerator]
	if accelerator == "" {
		accelerator = p.cfg.Accelerator
	}
	f, err := os.Create(p.path("domain.xml"))
	if err != nil {
		return "", err
	}
	t, err := template.New("domain").Parse(domain)
	if err == nil {
		err = t.Execute(f, map[string]string{
			"Accelerator": accelerator, "MiB": strconv.FormatInt(p.cfg.MemoryBytes>>20, 10), "CPUs": strconv.Itoa(p.cfg.CPUs),
			"Machine": p.cfg.Capabilities.MachineType, "Kernel": p.cfg.Image.Kernel(), "Initramfs": p.cfg.Initramfs,
			"Cmdline": p.cmdline() + " cryptomgr.notests rcupdate.rcu_expedited=1 panic=-1", "Binary": p.cfg.Capabilities.Binary,
			"Disk": p.disk(), "Link": p.path("link"), "CPU": p.cfg.Capabilities.CPU(p.cfg.Accelerator),
		})
	}
	return f.Name(), errors.Join(err, f.Close())
}

func (l *Libvirt) virsh(ctx context.Context, args ...string) ([]byte, error) {
	all := append([]string{"--mount", "--target", strconv.Itoa(l.daemon.Process.Pid), "virsh", "--connect", "qemu:///system"}, args...)
	return exec.CommandContext(ctx, "nsenter", all...).CombinedOutput()
}

// Guest is the guest, to talk to.
func (l *Libvirt) Guest(ctx context.Context) talk.Guest { return l.peer.Guest(ctx) }

// Snapshot keeps memory and disk in files, as people do it, and says how long
// that took in all.
func (l *Libvirt) Snapshot(ctx context.Context) (time.Duration, error) {
	l.count++
	memory := l.peer.path(fmt.Sprintf("memory-%d", l.count))
	begin := time.Now()
	out, err := l.virsh(ctx, "snapshot-create-as", "peer", fmt.Sprintf("s%d", l.count),
		"--memspec", "file="+memory+",snapshot=external",
		"--diskspec", fmt.Sprintf("vda,file=%s,snapshot=external", filepath.Join(l.peer.cfg.Dir, fmt.Sprintf("overlay-%d", l.count))))
	took := time.Since(begin)
	if err != nil {
		return 0, fmt.Errorf("virsh snapshot-create-as: %w: %s", err, out)
	}
	return took, os.Remove(memory) // they are not read again
}

// Close ends the machine and libvirtd.
func (l *Libvirt) Close() error {
	var errs []error
	if l.daemon != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if out, err := l.virsh(ctx, "destroy", "peer"); err != nil && !strings.Contains(string(out), "not running") &&
			!strings.Contains(string(out), "failed to get domain") {
			errs = append(errs, fmt.Errorf("virsh destroy: %w: %s", err, out))
		}
		errs = append(errs, l.daemon.Process.Signal(os.Interrupt))
		_ = l.daemon.Wait() // it ends by our signal
	}
	if l.said != nil {
		errs = append(errs, l.said.Close())
	}
	if l.peer != nil {
		if l.peer.talking != nil {
			l.peer.talking.Close()
		}
		errs = append(errs, l.peer.Close())
	}
	return errors.Join(errs...)
}
