package oci

import (
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"hash"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// digest is a content digest in the notation of the OCI image specification.
// The zero digest is none.
type digest struct{ algorithm, hex string }

// parseDigest takes the two algorithms that the specification registers; an
// unknown one is UNSUPPORTED, a malformed digest INVALID. What it returns is
// safe in a path.
func parseDigest(text string) (digest, error) {
	algorithm, digits, ok := strings.Cut(text, ":")
	length := 0
	switch algorithm {
	case "sha256":
		length = sha256.Size
	case "sha512":
		length = sha512.Size
	default:
		if ok {
			return digest{}, errdefs.New(errdefs.Unsupported, "digest %.100q: the algorithm is neither sha256 nor sha512", text)
		}
	}
	if raw, err := hex.DecodeString(digits); err != nil || !ok || len(raw) != length || digits != strings.ToLower(digits) {
		return digest{}, errdefs.New(errdefs.Invalid, "digest %.100q: it is malformed", text)
	}
	return digest{algorithm, digits}, nil
}

func (d digest) isZero() bool   { return d.hex == "" }
func (d digest) String() string { return d.algorithm + ":" + d.hex }

// path is where a layout keeps the blob.
func (d digest) path() string { return "blobs/" + d.algorithm + "/" + d.hex }

// hash begins to compute a digest of this algorithm.
func (d digest) hash() hash.Hash {
	if d.algorithm == "sha512" {
		return sha512.New()
	}
	return sha256.New()
}

func (d digest) is(h hash.Hash) bool { return hex.EncodeToString(h.Sum(nil)) == d.hex }

func (d digest) matches(data []byte) bool {
	h := d.hash()
	h.Write(data)
	return d.is(h)
}
