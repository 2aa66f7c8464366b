package tree

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// maxAccounts is how many bytes of /etc/passwd and /etc/group are read.
const maxAccounts = 4 << 20

// User is whom the image's program runs as.
type User struct {
	// Name is empty for a number that /etc/passwd does not have.
	Name     string
	UID, GID uint32
	// Groups are the further groups that /etc/group puts the user into, sorted;
	// none where a group was named.
	Groups []uint32
	// Home is "/" where /etc/passwd says none.
	Home string
}

// User resolves what Config.User says by the tree's /etc/passwd and
// /etc/group, as Docker does: "" is root, a number need not be there and has
// the group 0 then, a name that is not there is NOT_FOUND. Lines that are not
// as they should be are passed over.
func (t *Tree) User(spec string) (User, error) {
	name, group, hasGroup := strings.Cut(spec, ":")
	if name == "" {
		name = "0"
	}
	passwd, err := t.accounts("/etc/passwd")
	if err != nil {
		return User{}, err
	}
	groups, err := t.accounts("/etc/group")
	if err != nil {
		return User{}, err
	}
	u, err := findUser(passwd, name)
	if err != nil {
		return User{}, err
	}
	if hasGroup && group != "" {
		u.GID, err = findGroup(groups, group)
		return u, err
	}
	for _, fields := range groups {
		gid, ok := parseID(fields[2])
		if ok && len(fields) > 3 && u.Name != "" && slices.Contains(strings.Split(fields[3], ","), u.Name) {
			u.Groups = append(u.Groups, gid)
		}
	}
	slices.Sort(u.Groups)
	u.Groups = slices.Compact(u.Groups)
	return u, nil
}

// accounts reads a file of lines with fields between colons; those with fewer
// than three fields are left out. A missing file has no lines.
func (t *Tree) accounts(path string) ([][]string, error) {
	data, err := t.ReadFile(path, maxAccounts)
	if err != nil && !errdefs.Is(err, errdefs.NotFound) {
		return nil, err
	}
	var lines [][]string
	for line := range strings.Lines(string(data)) {
		if fields := strings.Split(strings.TrimSpace(line), ":"); len(fields) >= 3 {
			lines = append(lines, fields)
		}
	}
	return lines, nil
}

// findUser prefers a name over a number, as Docker does.
func findUser(passwd [][]string, want string) (User, error) {
	number, isNumber := parseID(want)
	var byNumber *User
	for _, fields := range passwd {
		if len(fields) < 6 {
			continue
		}
		uid, ok := parseID(fields[2])
		gid, ok2 := parseID(fields[3])
		if !ok || !ok2 {
			continue
		}
		u := User{Name: fields[0], UID: uid, GID: gid, Home: fields[5]}
		if u.Home == "" {
			u.Home = "/"
		}
		if u.Name == want {
			return u, nil
		}
		if byNumber == nil && isNumber && uid == number {
			byNumber = &u
		}
	}
	switch {
	case byNumber != nil:
		return *byNumber, nil
	case isNumber:
		return User{UID: number, Home: "/"}, nil
	}
	return User{}, errdefs.New(errdefs.NotFound, "find user %.100q: the image's /etc/passwd has none", want)
}

func findGroup(groups [][]string, want string) (uint32, error) {
	for _, fields := range groups {
		if gid, ok := parseID(fields[2]); ok && fields[0] == want {
			return gid, nil
		}
	}
	if gid, ok := parseID(want); ok {
		return gid, nil
	}
	return 0, errdefs.New(errdefs.NotFound, "find group %.100q: the image's /etc/group has none", want)
}

// parseID refuses 2^32-1, which the kernel takes for "no change".
func parseID(text string) (uint32, bool) {
	n, err := strconv.ParseUint(text, 10, 32)
	return uint32(n), err == nil && n != math.MaxUint32
}
