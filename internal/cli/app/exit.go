package app

import (
	"fmt"
	"slices"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// ExitOwn is our own failure in a verb that otherwise passes the exit code of
// a command in the machine on (docker uses the same).
const ExitOwn = 125

// Exit ends the process with a code and no words.
type Exit struct{ Code int }

// Error is never shown.
func (e Exit) Error() string { return fmt.Sprintf("exit code %d", e.Code) }

// ExitCode is the one place that knows the exit code of a kind.
func ExitCode(kind errdefs.Kind) int {
	switch kind {
	case "":
		return 0
	case errdefs.Invalid:
		return 2
	case errdefs.NotFound:
		return 3
	case errdefs.AlreadyExists, errdefs.Conflict, errdefs.RequestIDConflict:
		return 4
	case errdefs.MachineBusy, errdefs.WrongState:
		return 5
	case errdefs.Unsupported, errdefs.KindMismatch, errdefs.Incompatible:
		return 6
	case errdefs.Referenced:
		return 7
	case errdefs.OutcomeUnknown:
		return 8
	case errdefs.NoSpace, errdefs.Storage:
		return 9
	case errdefs.Deadline:
		return 10
	case errdefs.Denied:
		return 11
	case errdefs.Interrupted:
		return 130
	}
	return 1
}

// everyVerb are the kinds any verb may end with.
func everyVerb() []errdefs.Kind {
	return []errdefs.Kind{errdefs.Internal, errdefs.Invalid, errdefs.Interrupted}
}

// exitTable lists codes with the kinds of each, in the order of the codes.
func exitTable(kinds []errdefs.Kind) []string {
	byCode := map[int][]string{}
	for _, k := range kinds {
		code := ExitCode(k)
		if !slices.Contains(byCode[code], string(k)) {
			byCode[code] = append(byCode[code], string(k))
		}
	}
	codes := make([]int, 0, len(byCode))
	for code := range byCode {
		codes = append(codes, code)
	}
	slices.Sort(codes)
	lines := make([]string, 0, len(codes))
	for _, code := range codes {
		lines = append(lines, fmt.Sprintf("%3d  %s", code, strings.Join(byCode[code], ", ")))
	}
	return lines
}

// MachineKinds are the failures of verbs that change a machine's state, and
// more.
func MachineKinds(more ...errdefs.Kind) []errdefs.Kind {
	return append([]errdefs.Kind{
		errdefs.NotFound, errdefs.RequestIDConflict, errdefs.MachineBusy, errdefs.WrongState,
		errdefs.OutcomeUnknown, errdefs.Storage, errdefs.Deadline,
	}, more...)
}
