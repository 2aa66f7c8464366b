//go:build linux

package command

import (
	"bufio"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// user is who a command runs as.
type user struct {
	name   string
	uid    uint32
	gid    uint32
	groups []uint32
	home   string
	shell  string
}

// lookUp finds "user" or "user:group", names or numbers, in the account files
// below root. Empty is root. A number needs no account; its group is 0 then,
// as with other container tools.
func lookUp(root, spec string) (user, error) {
	name, group, hasGroup := strings.Cut(spec, ":")
	if name == "" {
		name = "0"
	}
	u, err := account(root, name)
	if err != nil {
		return user{}, err
	}
	if !hasGroup {
		u.groups = memberships(root, u.name)
		return u, nil
	}
	if u.gid, err = groupID(root, group); err != nil {
		return user{}, err
	}
	return u, nil
}

func account(root, name string) (user, error) {
	number, notNumber := parseID(name)
	found := user{home: "/", shell: "/bin/sh"}
	ok := false
	err := eachLine(filepath.Join(root, "etc/passwd"), func(f []string) bool {
		if len(f) < 7 {
			return true
		}
		uid, err1 := parseID(f[2])
		gid, err2 := parseID(f[3])
		if err1 != nil || err2 != nil || (f[0] != name && (notNumber != nil || uid != number)) {
			return true
		}
		found = user{name: f[0], uid: uid, gid: gid, home: f[5], shell: f[6]}
		ok = true
		return false
	})
	switch {
	case ok:
		if found.home == "" {
			found.home = "/"
		}
		if found.shell == "" {
			found.shell = "/bin/sh"
		}
		return found, nil
	case notNumber != nil && err != nil && !os.IsNotExist(err):
		return user{}, err
	case notNumber != nil:
		return user{}, errdefs.New(errdefs.NotFound, "user %q: no such account in the machine", name)
	case number == 0:
		return user{name: "root", home: "/root", shell: "/bin/sh"}, nil
	}
	found.name, found.uid = name, number
	return found, nil
}

func groupID(root, group string) (uint32, error) {
	if id, err := parseID(group); err == nil {
		return id, nil
	}
	id, ok := uint32(0), false
	_ = eachLine(filepath.Join(root, "etc/group"), func(f []string) bool { // not found is the error then
		if len(f) < 3 || f[0] != group {
			return true
		}
		n, err := parseID(f[2])
		id, ok = n, err == nil
		return false
	})
	if !ok {
		return 0, errdefs.New(errdefs.NotFound, "group %q: no such group in the machine", group)
	}
	return id, nil
}

// memberships are the groups that list the user.
func memberships(root, name string) []uint32 {
	var groups []uint32
	_ = eachLine(filepath.Join(root, "etc/group"), func(f []string) bool { // a machine without groups has none
		if len(f) < 4 {
			return true
		}
		for member := range strings.SplitSeq(f[3], ",") {
			if member == name {
				if id, err := parseID(f[2]); err == nil {
					groups = append(groups, id)
				}
			}
		}
		return true
	})
	return groups
}

func parseID(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err
}

// eachLine calls visit with the fields of each line until it returns false.
func eachLine(name string, visit func(fields []string) bool) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if !visit(strings.Split(lines.Text(), ":")) {
			return nil
		}
	}
	return nil
}
