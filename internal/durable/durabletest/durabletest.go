// Package durabletest records the steps of a durable.FS as golden text and
// stops them after the k-th, as a crash would. It is for tests alone.
package durabletest

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"github.com/holdpoint/holdpoint/internal/durable"
)

// ErrCrashed is what every step after the crash returns.
var ErrCrashed = errors.New("crashed by the test")

// Transcript is what was done, one step a line. Paths are relative to the
// root, temporary files lose their random part, and each id of 16 hexadecimal
// digits has a stable name: the one given by Name, else id1, id2, … in the
// order of appearance.
type Transcript struct {
	root string

	mu    sync.Mutex
	lines []string
	names map[string]string
}

// Record writes down the steps of f from now on, and leaves what f.Before was
// in force: a step that it stops is not written down.
func Record(f *durable.FS, root string) *Transcript {
	t := &Transcript{root: filepath.Clean(root), names: map[string]string{}}
	next := f.Before
	f.Before = func(s durable.Step) error {
		if next != nil {
			if err := next(s); err != nil {
				return err
			}
		}
		t.add(s)
		return nil
	}
	return t
}

// Name gives an id a name of its own. Call it before or after the recording.
func (t *Transcript) Name(id, name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.names[id] = name
}

// Len is the number of steps so far.
func (t *Transcript) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.lines)
}

// Reset forgets the steps so far; names stay.
func (t *Transcript) Reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines = nil
}

// String is the transcript, each line ended by a newline.
func (t *Transcript) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	// Compiled here: a package-level variable would outlive every test.
	temp := regexp.MustCompile(`\.[0-9a-f]{16}\.tmp\b`)
	id := regexp.MustCompile(`\b[0-9a-f]{16}\b`)
	names, n := map[string]string{}, 0
	for k, v := range t.names {
		names[k] = v
	}
	var b strings.Builder
	for _, line := range t.lines {
		line = temp.ReplaceAllString(line, ".tmp")
		line = id.ReplaceAllStringFunc(line, func(s string) string {
			if names[s] == "" {
				n++
				names[s] = fmt.Sprintf("id%d", n)
			}
			return names[s]
		})
		b.WriteString(line + "\n")
	}
	return b.String()
}

func (t *Transcript) add(s durable.Step) {
	s.Path, s.To = t.rel(s.Path), t.rel(s.To)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines = append(t.lines, s.String())
}

func (t *Transcript) rel(path string) string {
	if path == t.root {
		return "."
	}
	return filepath.ToSlash(strings.TrimPrefix(path, t.root+string(filepath.Separator)))
}

// CrashAfter lets k more steps of f happen and stops every later one with
// ErrCrashed, clean-up included: the process is dead by then. The returned
// function tells whether a step was stopped; when it was not, k is past the end.
func CrashAfter(f *durable.FS, k int) (crashed func() bool) {
	var mu sync.Mutex
	stopped, left, next := false, k, f.Before
	f.Before = func(s durable.Step) error {
		mu.Lock()
		dead := left <= 0
		if dead {
			stopped = true
		} else {
			left--
		}
		mu.Unlock()
		if dead {
			return ErrCrashed
		}
		if next != nil {
			return next(s)
		}
		return nil
	}
	return func() bool {
		mu.Lock()
		defer mu.Unlock()
		return stopped
	}
}
