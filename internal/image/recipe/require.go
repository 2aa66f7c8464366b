package recipe

import (
	"bufio"
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Requirement is one thing that image builds want of the host.
type Requirement struct {
	Name string
	OK   bool
	// Detail is what was found.
	Detail string
	// Fix is a command, or what to do; empty when OK.
	Fix string
	// packages are what the fix installs.
	packages []string
}

// minSubordinate is how many subordinate ids a Debian tree needs: its highest
// user, nobody, is 65534.
const minSubordinate = 65536

// Requirements finds out what of what image builds want is there. Each is
// looked at on its own: all that is missing is said at once.
func Requirements(ctx context.Context) []Requirement {
	all := []Requirement{
		architecture(runtime.GOARCH),
		tools("mmdebstrap", "mmdebstrap", "mmdebstrap"),
		tools("fakeroot", "fakeroot", "fakeroot"),
		tools("mkfs.ext4", "e2fsprogs", "mkfs.ext4", "debugfs"),
		tools("apt and tar", "apt tar", "apt-get", "apt-config", "tar"),
		keyring(os.DirFS("/")),
	}
	if os.Geteuid() != 0 {
		all = append(all, tools("newuidmap", "uidmap", "newuidmap", "newgidmap"), subordinate(os.DirFS("/")))
	}
	if !slices.ContainsFunc(all, func(r Requirement) bool { return !r.OK }) {
		all = append(all, namespaces(ctx, os.DirFS("/")))
	}
	return all
}

// Missing is nil when all requirements are met, else UNSUPPORTED with one line
// that says what to do.
func Missing(all []Requirement) error {
	var names, packages []string
	for _, r := range all {
		switch {
		case r.OK:
		case len(r.packages) > 0:
			names = append(names, r.Name)
			packages = append(packages, r.packages...)
		case len(packages) == 0:
			return errdefs.New(errdefs.Unsupported, "%s: %s; %s", r.Name, r.Detail, r.Fix)
		}
	}
	if len(packages) == 0 {
		return nil
	}
	verb := "is"
	if len(names) > 1 {
		verb = "are"
	}
	return errdefs.New(errdefs.Unsupported, "%s %s missing; run: %s", strings.Join(names, ", "), verb, install(packages))
}

func install(packages []string) string {
	return "sudo apt-get install " + strings.Join(packages, " ")
}

func architecture(arch string) Requirement {
	r := Requirement{Name: "image architecture", OK: arch == "amd64", Detail: "x86_64"}
	if !r.OK {
		r.Detail, r.Fix = "this host is "+arch+" and images are x86_64", "use an x86_64 host"
	}
	return r
}

func tools(name, packages string, files ...string) Requirement {
	r := Requirement{Name: name, OK: true}
	paths := make([]string, 0, len(files))
	for _, file := range files {
		found, err := FindTool(file)
		if err != nil {
			r.packages = strings.Fields(packages)
			r.OK, r.Detail, r.Fix = false, file+" is missing", "run: "+install(r.packages)
			return r
		}
		paths = append(paths, found)
	}
	r.Detail = strings.Join(paths, ", ")
	return r
}

// keyring is what Debian's packages are verified with; only Debian has it
// without being asked.
func keyring(root fs.FS) Requirement {
	r := Requirement{Name: "Debian's archive keyring"}
	for _, name := range []string{"debian-archive-keyring.gpg", "debian-archive-keyring.pgp"} {
		file := path.Join("usr/share/keyrings", name)
		if _, err := fs.Stat(root, file); err == nil {
			r.OK, r.Detail = true, "/"+file
			return r
		}
	}
	r.packages = []string{"debian-archive-keyring"}
	r.Detail, r.Fix = "none in /usr/share/keyrings", "run: "+install(r.packages)
	return r
}

// subordinate looks for the user's ranges of subordinate ids (subuid(5)), as
// which an ordinary user's build unpacks packages.
func subordinate(root fs.FS) Requirement {
	r := Requirement{Name: "subordinate ids"}
	me, err := user.Current()
	if err != nil {
		r.Detail, r.Fix = err.Error(), "add the user to /etc/passwd"
		return r
	}
	free := uint64(100000)
	for _, file := range []string{"etc/subuid", "etc/subgid"} {
		data, _ := fs.ReadFile(root, file) // without it: no ranges
		start, count, end := ranges(string(data), me.Username, me.Uid)
		free = max(free, end)
		if count < minSubordinate {
			r.Detail = fmt.Sprintf("%s has less than %d in /%s", me.Username, minSubordinate, file)
			continue
		}
		if r.Detail == "" {
			r.Detail, r.OK = fmt.Sprintf("%d from %d", count, start), true
		}
	}
	if strings.Contains(r.Detail, "less than") {
		last := free + minSubordinate - 1
		r.OK = false
		r.Fix = fmt.Sprintf("run: sudo usermod --add-subuids %d-%d --add-subgids %d-%d %s", free, last, free, last, me.Username)
	}
	return r
}

// ranges returns the first range of the user that is large enough, else the
// largest, and where all ranges of all users end.
func ranges(data, name, uid string) (start, count, end uint64) {
	scanner := bufio.NewScanner(strings.NewReader(data))
	for scanner.Scan() {
		fields := strings.Split(strings.TrimSpace(scanner.Text()), ":")
		if len(fields) != 3 {
			continue
		}
		first, err1 := strconv.ParseUint(fields[1], 10, 32)
		n, err2 := strconv.ParseUint(fields[2], 10, 32)
		if err1 != nil || err2 != nil {
			continue
		}
		end = max(end, first+n)
		if (fields[0] == name || fields[0] == uid) && count < minSubordinate && n > count {
			start, count = first, n
		}
	}
	return start, count, end
}

// namespaces tries what a build does first: the kernel, a container or AppArmor
// may forbid it, and only trying tells.
func namespaces(ctx context.Context, root fs.FS) Requirement {
	r := Requirement{Name: "namespaces"}
	var output strings.Builder
	err := Command{Args: []string{"mmdebstrap", "--unshare-helper", "true"}, Stdout: &output, Stderr: &output}.Run(ctx)
	if err == nil {
		r.OK, r.Detail = true, "they work"
		return r
	}
	read := func(file string) string {
		data, _ := fs.ReadFile(root, file) // without it: not forbidden that way
		return strings.TrimSpace(string(data))
	}
	lines := strings.Split(strings.TrimSpace(output.String()), "\n")
	r.Detail = "a new namespace is refused: " + strings.TrimPrefix(lines[len(lines)-1], "E: ")
	switch {
	case os.Geteuid() == 0:
		r.Fix = "this root may not create namespaces: build outside of the container, or as an ordinary user"
	case read("proc/sys/kernel/unprivileged_userns_clone") == "0":
		r.Fix = "run: sudo sysctl -w kernel.unprivileged_userns_clone=1"
	case read("proc/sys/user/max_user_namespaces") == "0":
		r.Fix = "run: sudo sysctl -w user.max_user_namespaces=15000"
	case read("proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
		r.Fix = "run: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or build as root"
	default:
		r.Fix = "build as root"
	}
	return r
}
