//go:build linux

package host

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/qmp"
)

// cpuModel is x86-64-v2 with AES, from the one family of models that is no
// vendor's, so that every Intel and AMD processor since about 2011 can be it and
// TCG too; "enforce" makes a host that cannot an error instead of a different
// machine. Under KVM the guest sees the host's vendor name, QEMU's default. Models named after
// Intel processors of that level also boot, but make guests under TCG switch page tables
// at each system call (Meltdown), a quarter of the boot time.
const cpuModel = "qemu64-v1,svm=off,ssse3=on,sse4.1=on,sse4.2=on,popcnt=on,aes=on,pclmulqdq=on,enforce=on"

// MachineOptions leave out what no guest of ours uses, for a smaller device
// state and a shorter boot: with them, and with virtio devices in their legacy
// form, all devices together are 27 KiB instead of 215. A panic or a reset ends
// the process; the next run is begun by whoever owns the machine.
const MachineOptions = ",suppress-vmdesc=on,dump-guest-core=off,mem-merge=off," +
	"sata=off,smbus=off,hpet=off,usb=off,vmport=off,graphics=off,i8042=off,smm=off"

// Sandbox is the value of -sandbox; nothing we do needs more.
const Sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"

// The oldest QEMU whose command line and commands are those used here.
const minMajor, minMinor = 7, 2

const probeTimeout = 20 * time.Second

// PackageAdvice is the fix for a missing or unfit QEMU.
const PackageAdvice = "install the package qemu-system-x86 (apt install qemu-system-x86 qemu-utils)"

// Capabilities are what a QEMU binary can do for us.
type Capabilities struct {
	// Binary is an absolute path.
	Binary string `json:"binary"`
	// Version is the full one, such as 7.2.22; Line is its major.minor, within
	// which checkpoints keep.
	Version string `json:"version"`
	Line    string `json:"line"`
	// MachineType is the highest versioned q35 of upstream QEMU.
	MachineType string `json:"machine_type"`
	// CPUModel is the CPU under KVM: a model, its version and its features; see CPU.
	CPUModel string `json:"cpu_model"`
	// DeviceState is whether QEMU can save its devices without memory
	// (xen-save-devices-state), which full checkpoints need.
	DeviceState bool `json:"device_state"`
	// Firmware are the folders that QEMU reads firmware from.
	Firmware []string `json:"firmware"`
}

// Probe finds the binary and asks it what it can. The answer is remembered for
// the binary's path, size and time of change. UNSUPPORTED when there is none
// or it is too old.
func (h *Host) Probe(ctx context.Context) (Capabilities, error) {
	path, err := exec.LookPath(h.cfg.Binary)
	if err != nil {
		return Capabilities{}, errdefs.New(errdefs.Unsupported, "find QEMU %q: %w; %s", h.cfg.Binary, err, PackageAdvice)
	}
	if path, err = filepath.Abs(path); err != nil {
		return Capabilities{}, fmt.Errorf("find QEMU %q: %w", h.cfg.Binary, err)
	}
	key, err := fileKey(path)
	if err != nil {
		return Capabilities{}, err
	}
	key += "|firmware|" + cpuModel // a new build of ours may ask for another
	h.probing.Lock()
	defer h.probing.Unlock()
	if h.known != nil && h.knownBy == key {
		return *h.known, nil
	}
	var caps Capabilities
	if !h.cached("qemu", key, &caps) {
		if caps, err = ask(ctx, path); err != nil {
			return Capabilities{}, err
		}
		h.remember(ctx, "qemu", key, caps)
	}
	h.known, h.knownBy = &caps, key
	return caps, nil
}

// ask runs the binary without a machine and questions it over QMP.
func ask(ctx context.Context, path string) (caps Capabilities, err error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	mine, theirs, err := SocketPair()
	if err != nil {
		return Capabilities{}, err
	}
	cmd := exec.CommandContext(ctx, path, "-M", "none", "-nodefaults", "-no-user-config", "-display", "none", "-S",
		"-chardev", "socket,id=qmp,fd=3", "-mon", "chardev=qmp,mode=control")
	var stderr strings.Builder
	cmd.Stderr, cmd.ExtraFiles, cmd.WaitDelay = &stderr, []*os.File{theirs}, time.Second
	defer Bind(cmd)()
	err = cmd.Start()
	_ = theirs.Close() // the child has its own
	if err != nil {
		_ = mine.Close()
		if ctx.Err() != nil {
			return Capabilities{}, fmt.Errorf("probe QEMU %q: %w", path, ctx.Err())
		}
		return Capabilities{}, errdefs.New(errdefs.Unsupported, "start QEMU %q: %w; %s", path, err, PackageAdvice)
	}
	defer func() {
		cancel()
		_ = cmd.Wait() // it was killed
		if err != nil && stderr.Len() > 0 {
			err = fmt.Errorf("%w: %s", err, LastLine(stderr.String()))
		}
	}()
	client, err := qmp.Connect(ctx, mine)
	if err != nil {
		return Capabilities{}, fmt.Errorf("probe QEMU %q: %w", path, err)
	}
	defer client.Close()
	if caps, err = question(ctx, path, client); err == nil {
		caps.Firmware, err = firmware(ctx, path)
	}
	return caps, err
}

// firmware asks the binary for its folders of firmware, in which some files are
// links into others.
func firmware(ctx context.Context, path string) (dirs []string, err error) {
	cmd := exec.CommandContext(ctx, path, "-L", "help")
	cmd.WaitDelay = time.Second
	defer Bind(cmd)()
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("ask QEMU %q for its firmware: %w", path, err)
	}
	for dir := range strings.Lines(string(out)) {
		dir = filepath.Clean(strings.TrimSpace(dir))
		dirs = append(dirs, dir)
		files, _ := filepath.Glob(filepath.Join(dir, "*")) // the pattern is good
		for _, file := range files {
			if target, err := filepath.EvalSymlinks(file); err == nil {
				dirs = append(dirs, filepath.Dir(target))
			}
		}
	}
	slices.Sort(dirs)
	return slices.Compact(dirs), nil
}

func question(ctx context.Context, path string, client *qmp.Client) (Capabilities, error) {
	type named struct{ Name string }
	var machines, models, commands []named
	err := client.Pipeline(ctx, qmp.Command{Name: "query-machines", Result: &machines},
		qmp.Command{Name: "query-cpu-definitions", Result: &models}, qmp.Command{Name: "query-commands", Result: &commands})
	if err != nil {
		return Capabilities{}, fmt.Errorf("probe QEMU %q: %w", path, err)
	}
	has := func(list []named, name string) bool { return slices.Contains(list, named{name}) }
	v := client.Version()
	caps := Capabilities{
		Binary: path, CPUModel: cpuModel,
		Version: fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Micro), Line: fmt.Sprintf("%d.%d", v.Major, v.Minor),
		DeviceState: has(commands, "xen-save-devices-state"),
	}
	names := make([]string, len(machines))
	for i, m := range machines {
		names[i] = m.Name
	}
	caps.MachineType = highestQ35(names)
	model, _, _ := strings.Cut(cpuModel, ",")
	unfit := func(what string) (Capabilities, error) {
		return Capabilities{}, errdefs.New(errdefs.Unsupported, "QEMU %s (%s) %s; install QEMU %d.%d or newer for x86-64", caps.Version, path, what, minMajor, minMinor)
	}
	switch {
	case v.Major < minMajor || v.Major == minMajor && v.Minor < minMinor:
		return unfit("is too old")
	case caps.MachineType == "":
		return unfit("has no pc-q35 machine")
	case !has(models, model):
		return unfit("has no CPU model " + model)
	}
	return caps, nil
}

var q35Pattern = regexp.MustCompile(`^pc-q35-(\d+)\.(\d+)$`)

// highestQ35 picks upstream's newest versioned q35; distributions add names
// such as pc-q35-noble, which other hosts do not have.
func highestQ35(names []string) string {
	best, bestMajor, bestMinor := "", -1, -1
	for _, name := range names {
		m := q35Pattern.FindStringSubmatch(name)
		if m == nil {
			continue
		}
		major, _ := strconv.Atoi(m[1]) // digits, by the pattern
		minor, _ := strconv.Atoi(m[2])
		if major > bestMajor || major == bestMajor && minor > bestMinor {
			best, bestMajor, bestMinor = name, major, minor
		}
	}
	return best
}

// LastLine is the last line that says something, without the program's name
// and the option it quotes.
func LastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	line := strings.TrimSpace(lines[len(lines)-1])
	line = strings.TrimPrefix(line, "qemu-system-x86_64: ")
	// QEMU quotes the whole option, JSON and all, before what is wrong with it.
	if i := strings.LastIndex(line, "}: "); i >= 0 && strings.HasPrefix(line, "-") {
		line = line[i+3:]
	}
	return line
}
