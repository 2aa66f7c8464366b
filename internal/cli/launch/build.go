package launch

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
)

// buildIDLength is how many hexadecimal digits tell builds apart.
const buildIDLength = 12

// Build names this program's build: the version, and a digest that differs
// for any two different executables. The Go linker writes a digest of the
// program into it (cmd/internal/buildid), near its beginning, so that one
// small read is enough; where it was stripped, the whole executable is
// digested.
func Build(version string) string {
	f, err := openSelf()
	if err != nil {
		return version
	}
	defer f.Close()
	digest, err := digestOf(f)
	if err != nil {
		return version
	}
	return version + "+" + digest[:buildIDLength]
}

func digestOf(f io.ReadSeeker) (string, error) {
	head := make([]byte, 32<<10) // as far as cmd/internal/buildid looks
	n, err := io.ReadFull(f, head)
	if err != nil && err != io.ErrUnexpectedEOF {
		return "", err
	}
	if id := goBuildID(head[:n]); len(id) > 0 {
		sum := sha256.Sum256(id)
		return hex.EncodeToString(sum[:]), nil
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	all := sha256.New()
	if _, err := io.Copy(all, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(all.Sum(nil)), nil
}

// goBuildID finds the linker's build id: in an ELF note, whose layout is name
// size 4, description size, type 4, "Go\0\0" and the id; elsewhere after
// "\xff Go build ID: \"".
func goBuildID(head []byte) []byte {
	if i := bytes.Index(head, []byte("\x04\x00\x00\x00Go\x00\x00")); i >= 4 {
		size := int(head[i-4]) | int(head[i-3])<<8
		if start := i + 8; start+size <= len(head) {
			return head[start : start+size]
		}
	}
	prefix := []byte("\xff Go build ID: \"")
	if i := bytes.Index(head, prefix); i >= 0 {
		rest := head[i+len(prefix):]
		if end := bytes.IndexByte(rest, '"'); end > 0 {
			return rest[:end]
		}
	}
	return nil
}

// openSelf opens the program that runs, even if its file was replaced since.
func openSelf() (*os.File, error) {
	if f, err := os.Open("/proc/self/exe"); err == nil {
		return f, nil
	}
	path, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return os.Open(path)
}
