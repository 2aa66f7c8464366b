package guest

import (
	"strings"
	"testing"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
)

// A command that somebody attached to outlives the stream; one of its own does not.
func TestGivenUp(t *testing.T) {
	for want, e := range map[string]*Exec{
		"exec in web: interrupted; the command was hung up": {Verb: "exec", Machine: "web", Start: &agentv1.ExecStart{}},
		"attach in web: interrupted; the command goes on":   {Verb: "attach", Machine: "web", Attach: &agentv1.ExecAttach{}},
	} {
		if err := e.givenUp(); err.Error() != want {
			t.Errorf("%q, want %q", err, want)
		}
	}
}

// Ctrl-P Ctrl-Q leaves, however the bytes arrive; every other input goes
// through unchanged, a lone Ctrl-P one byte late.
func TestLeaveKeys(t *testing.T) {
	for _, test := range []struct {
		typed string // "|" parts reads
		sent  string
		leave bool
	}{
		{"ls\r", "ls\r", false},
		{"a\x10\x11b", "a", true},
		{"a\x10|\x11b", "a", true},
		{"\x10|x", "\x10x", false},
		{"\x10\x10\x11", "\x10", true},
		{"\x11\x10", "\x11", false},
		{"\x11", "\x11", false},
	} {
		keys, sent, left := leaveKeys{enabled: true}, "", false
		for part := range strings.SplitSeq(test.typed, "|") {
			data, leave := keys.filter([]byte(part))
			sent += string(data)
			left = left || leave
		}
		if sent != test.sent || left != test.leave {
			t.Errorf("typed %q: sent %q, leave %v", test.typed, sent, left)
		}
	}
	var off leaveKeys
	if data, leave := off.filter([]byte("\x10\x11")); string(data) != "\x10\x11" || leave {
		t.Errorf("disabled keys took %q", data)
	}
}

// A guest whose agent says twice that the command began is told of, and does no harm.
func TestBegunTwice(t *testing.T) {
	r := &running{exec: &Exec{Verb: "exec", Machine: "web"}, started: make(chan struct{})}
	began := &agentv1.ExecResponse{Message: &agentv1.ExecResponse_Started{Started: &agentv1.ExecStarted{}}}
	var result Result
	if done, err := r.take(began, &result); done || err != nil {
		t.Fatal(done, err)
	}
	if _, err := r.take(began, &result); err == nil {
		t.Error("no word of it")
	}
}
