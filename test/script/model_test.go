package script_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/holdpoint/holdpoint/test/session"
)

// manyVariable makes tests that repeat themselves do so as often as it says.
const manyVariable = "HOLDPOINT_TEST_MANY"

// TestModel drives fake machines through all that full and disk checkpoints
// are for, in any order, and compares memory and disk after each step.
func TestModel(t *testing.T) {
	if testing.Short() {
		t.Skip("each step starts processes")
	}
	steps := 150
	if text := os.Getenv(manyVariable); text != "" {
		var err error
		if steps, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	s := newSession(t)
	m := &session.Model{
		Session: s, T: t, Run: []string{"--image", "debian"},
		Write: func(machine string, seed int) {
			s.Must(t, "exec", machine, "--", "sh", "-c", fmt.Sprintf("echo %d >run/content; echo %d >content", seed, seed))
		},
		Content: func(machine string) session.Content {
			out := s.Must(t, "exec", machine, "--", "sh", "-c", "cat run/content || echo none; cat content || echo none")
			lines := strings.Split(out, "\n")
			return session.Content{Memory: lines[0], Disk: lines[1]}
		},
	}
	m.Begin()
	// One long life instead of many: each begins with starting a daemon.
	step := rapid.Custom(func(r *rapid.T) bool { m.Step(r); return true })
	seed := int(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	for i := range steps {
		step.Example(seed + i)
	}
	if err := s.Clean(); err != nil {
		t.Fatal(err)
	}
}
