package guest

import "bytes"

// Kept keeps the first Limit bytes of a command's output, and drops the rest.
type Kept struct {
	Limit int

	bytes bytes.Buffer
	full  bool
}

// Write keeps what there is room for; it never fails.
func (k *Kept) Write(p []byte) (int, error) {
	keep := min(len(p), k.Limit-k.bytes.Len())
	k.full = k.full || keep < len(p)
	k.bytes.Write(p[:keep])
	return len(p), nil
}

// String is what was kept.
func (k *Kept) String() string { return k.bytes.String() }

// Full reports whether something was dropped.
func (k *Kept) Full() bool { return k.full }
