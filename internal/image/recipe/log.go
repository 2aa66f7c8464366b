package recipe

import (
	"bufio"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Log keeps what the tools print in a file, and of it what tells how the
// build goes and why it went wrong. Its life: NewLog, Write from one
// writer at a time, Close.
type Log struct {
	path string
	// step is called with each step that mmdebstrap begins.
	step func(text string)

	mu   sync.Mutex
	file *os.File
	rest []byte
	// errors are the first lines that look like one, those of our own steps
	// at the front.
	errors []string
	full   bool
}

// maxErrors bounds what Log remembers.
const maxErrors = 20

// logPrefix begins the names of logs.
const logPrefix = "image-build-"

// NewLog creates a log in dir, removes the oldest ones there, and calls step
// with each step that a tool says it begins.
func NewLog(dir string, step func(string)) (*Log, error) {
	name := logPrefix + time.Now().UTC().Format("20060102T150405.000000") + ".log"
	path := filepath.Join(dir, name)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "create the build's log: %w", err)
	}
	if err := removeOldLogs(dir); err != nil {
		return nil, errdefs.New(errdefs.Storage, "remove old logs: %w", errors.Join(err, f.Close()))
	}
	return &Log{path: path, step: step, file: f}, nil
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	// A log that cannot be written (a full disk) must not be what ends a
	// build: the tools' own failure says more.
	_, _ = l.file.Write(p)
	l.rest = append(l.rest, p...)
	for {
		advance, line, _ := bufio.ScanLines(l.rest, false)
		if advance == 0 {
			break
		}
		l.line(strings.TrimSpace(string(line)))
		l.rest = l.rest[advance:]
	}
	if len(l.rest) > 64<<10 {
		l.rest = nil
	}
	return len(p), nil
}

func (l *Log) line(line string) {
	if strings.Contains(line, "No space left on device") {
		l.full = true
	}
	if text, ok := strings.CutPrefix(line, "I: "); ok {
		for _, verb := range []string{"running apt-get", "downloading ", "extracting ", "installing ", "cleaning ", "creating "} {
			if strings.HasPrefix(text, verb) {
				l.step(strings.TrimSuffix(text, "..."))
			}
		}
	}
	for _, prefix := range []string{"E: ", "mkfs.ext4: ", "tar: "} {
		if text, ok := strings.CutPrefix(line, prefix); ok && len(l.errors) < maxErrors {
			l.errors = append(l.errors, text)
		}
	}
	if text, ok := strings.CutPrefix(line, "holdpoint: "); ok {
		l.errors = slices.Insert(l.errors, 0, text)
	}
}

// Reason is the line that says best why the tools failed; empty if none does.
func (l *Log) Reason() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.errors) == 0 {
		return ""
	}
	return l.errors[0]
}

// SawFull reports whether a tool found the disk full.
func (l *Log) SawFull() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.full
}

// Path is where the log is.
func (l *Log) Path() string { return l.path }

// Close ends the log.
func (l *Log) Close() error { return l.file.Close() }

// keptLogs is how many logs of builds are kept.
const keptLogs = 5

// removeOldLogs removes all but the newest logs of builds in dir; their names
// sort by age.
func removeOldLogs(dir string) error {
	found, err := filepath.Glob(filepath.Join(globQuote(dir), logPrefix+"*.log"))
	if err != nil {
		return err
	}
	slices.Sort(found)
	var errs []error
	for len(found) > keptLogs {
		errs = append(errs, os.Remove(found[0]))
		found = found[1:]
	}
	return errors.Join(errs...)
}
