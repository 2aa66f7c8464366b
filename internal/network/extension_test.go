package network

import "testing"

func TestMayBeICMP6(t *testing.T) {
	const icmp, udp, hop, routing, fragment, options = 58, 17, 0, 43, 44, 60
	ext := func(next byte) []byte { return []byte{next, 0, 0, 0, 0, 0, 0, 0} }
	long := append([]byte{icmp, 1}, make([]byte, 14)...)
	for what, c := range map[string]struct {
		next uint8
		rest []byte
		want bool
	}{
		"plain":                        {icmp, nil, true},
		"udp":                          {udp, nil, false},
		"behind hop-by-hop":            {hop, ext(icmp), true},
		"behind options":               {options, ext(icmp), true},
		"behind long options":          {options, long, true},
		"udp behind routing":           {routing, ext(udp), false},
		"behind several":               {hop, append(append(ext(options), ext(routing)...), ext(icmp)...), true},
		"a fragment":                   {fragment, ext(icmp), true},
		"a fragment of udp":            {fragment, ext(udp), false},
		"a fragment of what is hidden": {fragment, ext(options), true},
		"cut off":                      {options, []byte{icmp}, true},
		"too long":                     {options, []byte{udp, 9, 0, 0, 0, 0, 0, 0}, true},
	} {
		if got := mayBeICMP6(c.next, c.rest); got != c.want {
			t.Errorf("%s: %v", what, got)
		}
	}
}
