package vm_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/test/session"
)

// TestKilledAtRandomMoments kills the daemon at ten random moments and the
// monitor at ten others, of each of checkpoint create and restore. Both at once
// is left to the fake machines, where a round takes a second.
func TestKilledAtRandomMoments(t *testing.T) {
	prepared(t)
	for _, verb := range []string{"stopped", "frozen", "restore"} {
		t.Run(verb, func(t *testing.T) {
			t.Parallel()
			s, err := newSession()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := s.End(); err != nil {
					t.Error(err)
				}
			})
			s.Must(t, "run", "web", "--image", "debian", "--memory", "256M", "--cpus", "1")
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			k := session.Story{
				Session: s, Machine: "web", Rounds: 14, Random: rand.New(rand.NewPCG(seed, 0)),
				Victims: []session.Victim{session.Daemon, session.Monitor},
			}
			if verb == "restore" {
				k.CutRestores(t)
			} else {
				k.CutCheckpoints(t, verb, 1)
			}
		})
	}
}
