package source

import (
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
)

// Missing is nil when the tools that all imports need are there, else UNSUPPORTED
// with what to do.
func Missing() error {
	for _, tool := range []string{"debugfs", "e2fsck"} {
		if _, err := recipe.FindTool(tool); err != nil {
			return errdefs.New(errdefs.Unsupported, "%s is missing; run: sudo apt-get install e2fsprogs", tool)
		}
	}
	return nil
}

// maxOutput is how much of what a tool says is kept, in bytes.
const maxOutput = 1 << 20

// errTooLong is more output than was asked for.
var errTooLong = errors.New("it is too long")

// limited writes until it has no bytes left; then the tool behind it ends.
type limited struct {
	w    io.Writer
	left int64
	// over is whether there was more.
	over bool
}

// Write implements io.Writer.
func (l *limited) Write(p []byte) (int, error) {
	if int64(len(p)) > l.left {
		l.over = true
		return 0, errTooLong
	}
	l.left -= int64(len(p))
	return l.w.Write(p)
}

// lastLine is the last line of what a tool said, without its prefix.
func lastLine(text, prefix string) string {
	text = strings.TrimSpace(text)
	return strings.TrimPrefix(text[strings.LastIndexByte(text, '\n')+1:], prefix)
}

// storage gives an error of our own files its kind.
func storage(path string, err error) error {
	kind := errdefs.Storage
	if errors.Is(err, syscall.ENOSPC) {
		kind = errdefs.NoSpace
		err = fmt.Errorf("%w; free some space and import again", err)
	}
	return errdefs.New(kind, "write %s: %w", filepath.Base(path), err)
}

// exitCode is that of the process in err's chain; -1 for none.
func exitCode(err error) int {
	var e *exec.ExitError
	if errors.As(err, &e) {
		return e.ExitCode()
	}
	return -1
}
