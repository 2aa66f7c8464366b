//go:build linux

package host

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/holdpoint/holdpoint/internal/qemu/isolation"
)

// Program is what QEMU needs of the host to run at all: its program and
// libraries, which it executes, its firmware, and what it looks up of the processor.
func (c Capabilities) Program() (execute, read []string) {
	read = append(slices.Clone(c.Firmware), "/etc/ld.so.cache", "/sys/devices/system/cpu", "/sys/kernel/mm/transparent_hugepage")
	return append(libraries(c.Binary), c.Binary), read
}

// libraries are the folders from which the loader takes those of a program, by
// convention; package managers that keep every package in a folder of its own
// have them all in one.
func libraries(program string) []string {
	dirs := []string{"/lib", "/lib64", "/usr/lib", "/usr/lib64"}
	target, err := filepath.EvalSymlinks(program)
	if err != nil {
		return dirs
	}
	for _, store := range []string{"/nix/store", "/gnu/store"} {
		if strings.HasPrefix(target, store+"/") {
			return append(dirs, store)
		}
	}
	prefix := filepath.Dir(filepath.Dir(target))
	return append(dirs, filepath.Join(prefix, "lib"), filepath.Join(prefix, "lib64"))
}

// checkIsolation starts QEMU as machines do, without one, and says what keeps it
// from the rest of the host.
func (h *Host) checkIsolation(ctx context.Context, without isolation.Without) Check {
	const name = "isolation"
	caps, err := h.Probe(ctx)
	if err != nil {
		return failed(name, "there is no QEMU to try", PackageAdvice)
	}
	spec := isolation.Spec{Write: []string{"/dev/null"}, Without: without}
	spec.Execute, spec.Read = caps.Program()
	if why, err := isolation.Wrapper(caps.Binary); err != nil || why != "" {
		spec.Without = isolation.Without{isolation.Files: why, isolation.Namespaces: why}
	}
	process, by, err := spec.Start(func() *exec.Cmd { return exec.Command(caps.Binary, "-version") })
	if err != nil {
		return failed(name, err.Error(), "see the checks above")
	}
	if st, err := process.Wait(); err != nil || !st.Success() {
		return failed(name, fmt.Sprintf("QEMU does not start in isolation (%s)", st), "report it with the output of: "+caps.Binary+" -L help")
	}
	if len(by.Missing) == 0 {
		return ok(name, "a QEMU reaches its own machine only, by "+strings.Join(by.By, ", "))
	}
	return degraded(name, "machines run, with less between a QEMU that its guest has taken over and this host: "+strings.Join(by.Missing, "; "), isolationFix(by.Missing))
}

// isolationFix is what a person can do about the first thing that is missing.
func isolationFix(missing []string) string {
	switch {
	case strings.HasPrefix(missing[0], string(isolation.Files)):
		return "boot a Linux kernel 5.13 or newer with landlock in its parameter lsm=, and use QEMU's program itself, no script"
	case strings.HasPrefix(missing[0], string(isolation.Namespaces)):
		return "permit user namespaces: sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone or kernel.apparmor_restrict_unprivileged_userns"
	}
	return "boot a Linux kernel with CONFIG_SECCOMP_FILTER"
}
