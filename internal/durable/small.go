package durable

import (
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// ReadSmall reads a file that others have written, of at most limit bytes. STORAGE
// when it cannot be read or is larger.
func ReadSmall(path string, limit int64) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "read %s: %w", filepath.Base(path), err)
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = errors.New("it is too large")
	}
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "read %s: %w", filepath.Base(path), err)
	}
	return data, nil
}
