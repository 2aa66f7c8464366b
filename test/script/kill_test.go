package script_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/test/session"
)

// TestKilledAtRandomMoments kills the daemon, the monitor and both in the middle
// of stopped and frozen checkpoints and of restores: of each at ten moments, ten and five.
func TestKilledAtRandomMoments(t *testing.T) {
	for _, verb := range []string{"stopped", "frozen", "restore"} {
		t.Run(verb, func(t *testing.T) {
			t.Parallel()
			s := newSession(t)
			s.Must(t, "run", "web", "--image", "debian")
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			k := session.Story{
				Session: s, Machine: "web", Rounds: 25, Random: rand.New(rand.NewPCG(seed, 0)),
				Victims: []session.Victim{session.Daemon, session.Monitor, session.Daemon, session.Monitor, session.Both},
			}
			if verb == "restore" {
				k.CutRestores(t)
			} else {
				k.CutCheckpoints(t, verb, 4)
			}
		})
	}
}
