//go:build linux

package freeze

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// HooksDir is where the programs are, in the guest, that are run before all is
// frozen and after all is thawed, with the word freeze or thaw.
const HooksDir = "/etc/holdpoint/hooks.d"

// hooksLimit bounds all hooks of one word together, and maxSaid what is kept of
// the output of one that fails, in bytes.
const (
	hooksLimit = 10 * time.Second
	maxSaid    = 200
)

// Run runs a program to its end, or ends it with ctx, and gives what it printed.
type Run func(ctx context.Context, argv ...string) (output []byte, err error)

// HooksIn gives the hooks of a folder: each executable file in it, in the order
// of their names for freeze and the other way round for thaw. One that fails
// keeps the others from freezing, and does not keep any from thawing.
func HooksIn(dir string, run Run) func(ctx context.Context, verb string) error {
	return func(ctx context.Context, verb string) error {
		programs, err := list(dir)
		if err != nil {
			return err
		}
		if verb == "thaw" {
			slices.Reverse(programs)
		}
		ctx, cancel := context.WithTimeout(ctx, hooksLimit)
		defer cancel()
		var failed error
		for _, p := range programs {
			output, err := run(ctx, p, verb)
			switch {
			case err == nil:
				continue
			case errors.Is(ctx.Err(), context.DeadlineExceeded):
				err = errdefs.New(errdefs.Deadline, "hook %s %s: it was ended after %s", p, verb, hooksLimit)
			default:
				err = fmt.Errorf("hook %s %s: %w: %s", p, verb, err, said(output))
			}
			failed = errors.Join(failed, err)
			if verb == "freeze" {
				break
			}
		}
		return failed
	}
}

func list(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list hooks: %w", err)
	}
	var programs []string
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			programs = append(programs, path)
		}
	}
	return programs, nil
}

// said is the last line of an output.
func said(output []byte) string {
	text := strings.TrimSpace(strings.ToValidUTF8(string(output), "?"))
	text = text[strings.LastIndexByte(text, '\n')+1:]
	for len(text) > maxSaid {
		_, n := utf8.DecodeRuneInString(text)
		text = text[n:]
	}
	return text
}
