// Package restore puts a machine back to a checkpoint: it compares routes for
// the plan, keeps what is discarded, and swaps the run and the chain so that
// everything before the commit can be undone. How runs are started and ended is
// its caller's.
package restore

import (
	"cmp"
	"slices"
	"strings"

	"github.com/holdpoint/holdpoint/internal/checkpoint"
)

// How a route stands now, compared with the checkpoint.
const (
	Same    = "same"
	Changed = "changed"
	Added   = "added"
	Removed = "removed"
	// Foreign: the host name belongs to another machine now.
	Foreign = "foreign"
)

// Whether something will listen on a route's port after the restore.
const (
	Yes     = "yes"
	No      = "no"
	Unknown = "unknown"
)

// RouteChange is one route, compared.
type RouteChange struct {
	Host   string
	Change string
	// Then and Now are the ports at the checkpoint and now; 0 for none.
	Then, Now int
	// Listening is about the port the host has after the restore.
	Listening string
	// Owner is the other machine's name, of a foreign one.
	Owner string
}

// CompareRoutes compares the routes stored in a disk checkpoint with those the
// machine has now. owners names the machine of every other published host.
// With putBack the routes of the checkpoint count as the ones to come. The
// result is sorted by host.
//
// What will listen after a boot is known only of a port that something started
// by the boot listened on at the capture; that is what Route.Listening says.
func CompareRoutes(then, now []checkpoint.Route, owners map[string]string, putBack bool) []RouteChange {
	current := map[string]int{}
	for _, r := range now {
		current[r.Host] = r.Port
	}
	listened := map[int]bool{}
	var changes []RouteChange
	for _, r := range then {
		if r.Listening {
			listened[r.Port] = true
		}
		c := RouteChange{Host: r.Host, Then: r.Port, Now: current[r.Host], Change: Changed}
		switch {
		case owners[r.Host] != "":
			c.Change, c.Owner = Foreign, owners[r.Host]
		case c.Now == 0:
			c.Change = Removed
		case c.Now == c.Then:
			c.Change = Same
		}
		delete(current, r.Host)
		changes = append(changes, c)
	}
	for host, port := range current {
		changes = append(changes, RouteChange{Host: host, Change: Added, Now: port})
	}
	for i := range changes {
		changes[i].Listening = changes[i].listening(listened, putBack)
	}
	slices.SortFunc(changes, func(a, b RouteChange) int { return cmp.Compare(a.Host, b.Host) })
	return changes
}

func (c RouteChange) listening(listened map[int]bool, putBack bool) string {
	port := c.After(putBack)
	switch {
	case port == 0:
		return No
	case listened[port]:
		return Yes
	}
	return Unknown
}

// After is the port that the host leads to in this machine after the restore;
// 0 for none.
func (c RouteChange) After(putBack bool) int {
	switch {
	case c.Change == Foreign:
		return 0
	case putBack:
		return c.Then
	}
	return c.Now
}

// StartedByBoot reports whether the on-boot command, run by the shell, starts
// the process that a listener belongs to: its name is one of the command's
// words, or the last element of one that is a path.
func StartedByBoot(onBoot, process string) bool {
	if process == "" {
		return false
	}
	words := strings.FieldsFunc(onBoot, func(r rune) bool { return strings.ContainsRune(" \t\n;&|()<>\"'`$", r) })
	return slices.ContainsFunc(words, func(word string) bool {
		return word[strings.LastIndexByte(word, '/')+1:] == process
	})
}
