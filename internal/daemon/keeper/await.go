//go:build linux

package keeper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"unicode"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// awaitGuest waits for what await says of the guest, and ends a run of which
// that does not come true. A guest that ends before, or is silent, has its
// console quoted: a machine that was never more than begun is removed, and its
// log with it.
func (k *Keeper) awaitGuest(ctx context.Context, m catalog.Machine, run *fleet.Run, await func(context.Context) error) error {
	late := errdefs.New(errdefs.Deadline, "the guest did not answer within %s", bootTimeout)
	if m.State != machine.Creating && m.ID != "" {
		late = errdefs.New(errdefs.Deadline, "%w; its console is in holdpoint logs %s", late, m.Name)
	}
	ready, cancel := context.WithTimeoutCause(ctx, bootTimeout, late)
	defer cancel()
	err := await(ready)
	if err == nil {
		return nil
	}
	if run.Ended() || errors.Is(err, late) {
		if said := consoleEnd(run.Dir()); said != "" {
			err = fmt.Errorf("%w; its console ends with: %s", err, said)
		}
	}
	end, stop := context.WithTimeout(context.WithoutCancel(ctx), recordTimeout)
	defer stop()
	return errors.Join(err, run.Kill(end))
}

// What is quoted of a console: the last lines, and of these the last bytes.
const (
	quotedLines = 3
	quotedBytes = 300
	// quotedFrom is how much of the log is read for that.
	quotedFrom = 4 << 10
)

// consoleEnd is what a run's guest printed last, in one line of printable
// characters; "" where that cannot be read.
func consoleEnd(dir string) string {
	f, err := os.Open(filepath.Join(dir, "console.log"))
	if err != nil {
		return ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	b, _ := io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-quotedFrom), quotedFrom)) // what was read counts
	return quote(string(b))
}

// quote makes one line of the last lines of a console's text.
func quote(text string) string {
	// Sequences that a terminal takes for colors, moves and titles (ECMA-48).
	text = regexp.MustCompile(`\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[ -/]*[0-~])`).ReplaceAllString(text, "")
	var lines []string
	for line := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == '\n' || r == '\r' }) {
		line = strings.Join(strings.Fields(strings.Map(func(r rune) rune {
			switch {
			case unicode.IsSpace(r):
				return ' '
			case r == unicode.ReplacementChar || !unicode.IsPrint(r):
				return -1
			}
			return r
		}, line)), " ")
		if line != "" {
			lines = append(lines, line)
		}
	}
	lines = lines[max(0, len(lines)-quotedLines):]
	all := strings.Join(lines, " | ")
	if len(all) > quotedBytes {
		all = "..." + strings.ToValidUTF8(all[len(all)-quotedBytes:], "")
	}
	return all
}
