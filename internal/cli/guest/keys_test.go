package guest

import (
	"strings"
	"testing"
)

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
