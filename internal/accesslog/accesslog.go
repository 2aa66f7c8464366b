// Package accesslog keeps what came through the routes of machines: one line
// for each request or connection, of each route by itself, in files of bounded
// size. It is a log and no state: nothing is synced, and a line that cannot be
// written is lost.
package accesslog

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// fileBytes is when a route's log goes on in a new file.
	fileBytes = 512 << 10
	// filesKept are how many files of a route there are at most.
	filesKept = 2
	// maxPath bounds the path of a line, in bytes; clients write it.
	maxPath = 512
	// maxFolder bounds a folder's name, below what file systems take.
	maxFolder = 200
)

// Entry is one request, or one TCP connection.
type Entry struct {
	At     time.Time
	Client string
	// Method is empty for a TCP connection, and so are Path, Query, Protocol and
	// Status.
	Method, Path string
	// Query says that there was one. It may be a secret and is not kept.
	Query    bool
	Protocol string
	Status   int
	// Received is counted of TCP connections only.
	Received, Sent int64
	Took           time.Duration
	// Note is what went wrong, if anything did.
	Note string
}

// String is the entry's line: printable ASCII, whatever a client sent.
func (e Entry) String() string {
	fields := []string{e.At.UTC().Format("2006-01-02T15:04:05.000Z"), e.Client}
	if e.Method == "" {
		fields = append(fields, "TCP", "in="+strconv.FormatInt(e.Received, 10), "out="+strconv.FormatInt(e.Sent, 10))
	} else {
		path := harmless(e.Path)
		if len(path) > maxPath {
			path = path[:maxPath] + "..."
		}
		if e.Query {
			path += "?..."
		}
		fields = append(fields, harmless(e.Method), path, e.Protocol, strconv.Itoa(e.Status), strconv.FormatInt(e.Sent, 10))
	}
	fields = append(fields, strconv.FormatFloat(float64(e.Took.Microseconds())/1000, 'f', 1, 64)+"ms")
	if e.Note != "" {
		words := strings.Fields(e.Note)
		for i, w := range words {
			words[i] = harmless(w)
		}
		fields = append(fields, "("+strings.Join(words, " ")+")")
	}
	return strings.Join(fields, " ")
}

// harmless escapes all but printable ASCII, and blanks, as URLs do.
func harmless(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if c := s[i]; c > ' ' && c < 0x7f {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// Log is the logs of all routes of a home. The zero pointer keeps nothing.
type Log struct {
	dir string

	mu sync.Mutex
	// current is each route's newest file, by its folder.
	current map[string]file
}

type file struct {
	number int
	size   int64
}

// New returns the logs below dir.
func New(dir string) *Log { return &Log{dir: dir, current: map[string]file{}} }

// Folder is where the log of a machine's route is.
func (l *Log) Folder(machineID, host string) string {
	if len(host) > maxFolder {
		// What differs may be behind. No host name has a tilde.
		sum := sha256.Sum256([]byte(host))
		end := "~" + hex.EncodeToString(sum[:8])
		host = host[:maxFolder-len(end)] + end
	}
	return filepath.Join(l.dir, machineID, host)
}

// Files are the files of a route, oldest first; none is ever renamed.
func (l *Log) Files(machineID, host string) ([]string, error) {
	folder := l.Folder(machineID, host)
	numbers, err := numbersIn(folder)
	paths := make([]string, 0, len(numbers))
	for _, n := range numbers {
		paths = append(paths, path(folder, n))
	}
	return paths, err
}

func path(folder string, number int) string { return filepath.Join(folder, strconv.Itoa(number)) }

func numbersIn(folder string) ([]int, error) {
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read access log: %w", err)
	}
	var numbers []int
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err == nil && n > 0 {
			numbers = append(numbers, n)
		}
	}
	slices.SortFunc(numbers, cmp.Compare)
	return numbers, nil
}

// Add appends an entry to the log of a machine's route.
func (l *Log) Add(machineID, host string, e Entry) error {
	if l == nil {
		return nil
	}
	line := []byte(e.String() + "\n")
	l.mu.Lock()
	defer l.mu.Unlock()
	folder := l.Folder(machineID, host)
	now, err := l.open(folder)
	if err != nil {
		return err
	}
	if now.size > 0 && now.size+int64(len(line)) > fileBytes {
		now = file{number: now.number + 1}
		if old := now.number - filesKept; old > 0 {
			_ = os.Remove(path(folder, old)) // it is tried again by the next
		}
	}
	if err := appendTo(path(folder, now.number), line); err != nil {
		delete(l.current, folder) // somebody may have removed the folder
		return err
	}
	now.size += int64(len(line))
	l.current[folder] = now
	return nil
}

// open gives the newest file of a route, which may not be there yet.
func (l *Log) open(folder string) (file, error) {
	if now, known := l.current[folder]; known {
		return now, nil
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return file{}, fmt.Errorf("make access log: %w", err)
	}
	numbers, err := numbersIn(folder)
	if err != nil || len(numbers) == 0 {
		return file{number: 1}, err
	}
	now := file{number: numbers[len(numbers)-1]}
	info, err := os.Stat(path(folder, now.number))
	if err != nil {
		return file{}, fmt.Errorf("look at access log: %w", err)
	}
	now.size = info.Size()
	return now, nil
}

func appendTo(path string, line []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open access log: %w", err)
	}
	_, err = f.Write(line)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write access log: %w", err)
	}
	return nil
}

// Keep removes the logs of all machines but those that keep says.
func (l *Log) Keep(keep func(machineID string) bool) error {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	machines, err := os.ReadDir(l.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("list access logs: %w", err)
	}
	for _, m := range machines {
		if keep(m.Name()) {
			continue
		}
		dir := filepath.Join(l.dir, m.Name())
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove access log: %w", err)
		}
		for folder := range l.current {
			if filepath.Dir(folder) == dir {
				delete(l.current, folder)
			}
		}
	}
	return nil
}
