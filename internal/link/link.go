// Package link is the conversation over the agent link: one byte channel
// between the host and the process in the guest that outlives every
// connection made over it. The channel (a virtio-serial port) can be opened
// once only in the guest, reports its end unreliably, and hands bytes of an
// old conversation to a new one, also after a restore. So a conversation
// begins like this:
//
//	host  → guest   magic (16 bytes)  nonce (8 bytes)
//	guest → host    magic (16 bytes)  nonce (8 bytes)
//
// The magic is random for each machine, the nonce for each conversation. The
// guest looks for the magic in all it reads; where it finds it, it ends the
// conversation before and answers. The host discards what it reads until the
// answer. All bytes after that belong to the conversation.
//
// What is said in a conversation is HTTP/2; this package knows only how its
// ends are tuned to the channel (see Transport and HTTP2).
package link

import (
	"crypto/rand"
	"encoding/hex"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const (
	magicLen = 16
	nonceLen = 8
	helloLen = magicLen + nonceLen
)

// Magic begins each conversation with one machine.
type Magic [magicLen]byte

// NewMagic returns a random magic.
func NewMagic() Magic {
	var m Magic
	_, _ = rand.Read(m[:]) // never fails, see crypto/rand
	return m
}

// ParseMagic reads the form that String writes: 32 hexadecimal digits.
func ParseMagic(s string) (Magic, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != magicLen {
		return Magic{}, errdefs.New(errdefs.Invalid, "link magic %q: use 32 hexadecimal digits", s)
	}
	return Magic(b), nil
}

// MagicIn finds the magic in a guest's kernel command line, where it is
// holdpoint.magic=<32 hexadecimal digits>; the last one counts.
func MagicIn(cmdline string) (magic Magic, err error) {
	err = errdefs.New(errdefs.Invalid, "kernel command line %q: holdpoint.magic=<32 hexadecimal digits> is missing", cmdline)
	for word := range strings.FieldsSeq(cmdline) {
		if digits, ok := strings.CutPrefix(word, "holdpoint.magic="); ok {
			magic, err = ParseMagic(digits)
		}
	}
	return magic, err
}

// String is the magic as 32 lower-case hexadecimal digits.
func (m Magic) String() string { return hex.EncodeToString(m[:]) }
