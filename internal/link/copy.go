package link

// copyPiece is the size up to which Go copies memory with SSE on a CPU without
// AVX. Larger copies between places of different alignment go byte by byte
// there (runtime/memmove_amd64.s), which an emulated CPU does at 200 MB/s
// instead of 1 GB/s.
const copyPiece = 2 << 10

// Copy is copy, fast for bytes of any alignment on any CPU.
func Copy(dst, src []byte) int {
	n := min(len(dst), len(src))
	for at := 0; at < n; at += copyPiece {
		copy(dst[at:min(n, at+copyPiece)], src[at:])
	}
	return n
}

// Append is append, fast for bytes of any alignment on any CPU.
func Append(dst, src []byte) []byte {
	at := len(dst)
	if cap(dst)-at < len(src) {
		grown := make([]byte, at, at+len(src)+at/4)
		copy(grown, dst)
		dst = grown
	}
	dst = dst[:at+len(src)]
	Copy(dst[at:], src)
	return dst
}
