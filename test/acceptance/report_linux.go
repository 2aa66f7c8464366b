package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Report is all that can be told. What is counted only ever grows.
type Report struct {
	// Nonce was drawn when the program started, once.
	Nonce string `json:"nonce"`
	// Starts is how often it was started on this disk.
	Starts int `json:"starts"`
	// Counters are of the threads that are pinned, one on each CPU.
	Counters []uint64 `json:"counters"`
	// Records are those appended to the file.
	Records uint64 `json:"records"`
	// Passed are the numbers that came back from the other process.
	Passed uint64 `json:"passed"`
	// Ticks are the timer's.
	Ticks uint64 `json:"ticks"`
	// Changes are those of memory, Digest is of all of it.
	Changes uint64 `json:"changes"`
	Digest  string `json:"digest"`
	// DirectReads are past the page cache, CachedReads through it.
	DirectReads uint64 `json:"direct_reads"`
	CachedReads uint64 `json:"cached_reads"`
	// Mark is what the host has said last.
	Mark string `json:"mark"`
	// Wall is the guest's wall clock, nanoseconds since 1970.
	Wall int64 `json:"wall"`
	// Problems are what is wrong; none is the verdict that all is well.
	Problems []string `json:"problems"`
}

// counts are those that only grow, with their names.
func (r *Report) counts() map[string]uint64 {
	counts := map[string]uint64{
		"records": r.Records, "passed": r.Passed, "ticks": r.Ticks, "changes": r.Changes,
		"direct reads": r.DirectReads, "cached reads": r.CachedReads, "starts": uint64(r.Starts),
	}
	for i, c := range r.Counters {
		counts[fmt.Sprintf("counter of CPU %d", i)] = c
	}
	return counts
}

// compare adds what went backwards since an earlier report.
func (r *Report) compare(earlier Report) {
	now := r.counts()
	if earlier.Nonce != r.Nonce || earlier.Starts != r.Starts {
		r.Problems = append(r.Problems, fmt.Sprintf("it was started again: start %d with nonce %s, then %d with %s",
			earlier.Starts, earlier.Nonce, r.Starts, r.Nonce))
	}
	for name, then := range earlier.counts() {
		if now[name] < then {
			r.Problems = append(r.Problems, fmt.Sprintf("%s went from %d back to %d", name, then, now[name]))
		}
	}
}

// part is one thing that has something to lose.
type part interface {
	// report adds its counts. An error is what it lost.
	report(r *Report) error
}

// live starts all parts and answers
//
//	report [EARLIER]  a Report, compared with an earlier one
//	mark TEXT         keeps the text in memory, for reports
//	draw              32 bytes of getrandom(2), hexadecimal
func live(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	nonce, err := markStart(filepath.Join(dir, "starts"))
	if err != nil {
		return err
	}
	var parts []part
	for name, start := range map[string]func() (part, error){
		"counters": startCounters,
		"file":     func() (part, error) { return startFile(filepath.Join(dir, "records")) },
		"pipe":     startPipe,
		"timer":    startTimer,
		"memory":   func() (part, error) { return startMemory() },
		"disk":     func() (part, error) { return startReader(filepath.Join(dir, "blocks")) },
	} {
		p, err := start()
		if err != nil {
			return fmt.Errorf("start %s: %w", name, err)
		}
		parts = append(parts, p)
	}
	r := Report{Nonce: nonce}
	return serve(dir, func(command, argument string) (string, error) {
		switch command {
		case "report":
			return report(dir, r, parts, argument)
		case "mark":
			r.Mark = argument
			return "marked", nil
		case "draw":
			return draw(32)
		}
		return "", fmt.Errorf("unknown command %q", command)
	})
}

func report(dir string, r Report, parts []part, earlier string) (string, error) {
	r.Problems = []string{}
	starts, err := os.ReadFile(filepath.Join(dir, "starts"))
	if err != nil {
		return "", err
	}
	r.Starts = bytes.Count(starts, []byte("\n"))
	if lines := strings.Fields(string(starts)); r.Starts == 0 || lines[r.Starts-1] != r.Nonce {
		r.Problems = append(r.Problems, fmt.Sprintf("the disk's last start is not of this process: %q, not %s", starts, r.Nonce))
	}
	for _, p := range parts {
		if err := p.report(&r); err != nil {
			r.Problems = append(r.Problems, err.Error())
		}
	}
	r.Wall = time.Now().UnixNano()
	if earlier != "" {
		var e Report
		if err := json.Unmarshal([]byte(earlier), &e); err != nil {
			return "", err
		}
		r.compare(e)
	}
	text, err := json.Marshal(r)
	return string(text), err
}

// markStart leaves a line on the disk for each time the program was started.
func markStart(path string) (nonce string, err error) {
	if nonce, err = draw(8); err != nil {
		return "", err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return "", err
	}
	_, err = fmt.Fprintln(f, nonce)
	return nonce, errors.Join(err, f.Sync(), f.Close())
}

// draw takes n bytes from the kernel itself, past any buffer of a library.
func draw(n int) (string, error) {
	b := make([]byte, n)
	if _, err := unix.Getrandom(b, 0); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", b), nil
}
