package disk

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Digest is the sha256 digest of a file, as the catalog has it, and the file's
// size in bytes. Its errors leave it to the caller to name the file.
func Digest(ctx context.Context, path string) (digest string, bytes int64, err error) {
	file, err := os.Open(path)
	if err != nil {
		return "", 0, errdefs.New(errdefs.Storage, "read it: %w", err)
	}
	defer file.Close()
	hash := sha256.New()
	buffer := make([]byte, 1<<20)
	for {
		if err := ctx.Err(); err != nil {
			return "", bytes, context.Cause(ctx)
		}
		n, err := file.Read(buffer)
		hash.Write(buffer[:n])
		bytes += int64(n)
		if errors.Is(err, io.EOF) {
			return text([sha256.Size]byte(hash.Sum(nil))), bytes, nil
		}
		if err != nil {
			return "", bytes, errdefs.New(errdefs.Storage, "read it: %w", err)
		}
	}
}

// DigestOf is the Digest of a file with the content.
func DigestOf(content []byte) string { return text(sha256.Sum256(content)) }

func text(sum [sha256.Size]byte) string { return fmt.Sprintf("sha256:%x", sum) }
