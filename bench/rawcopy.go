//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/holdpoint/holdpoint/bench/stage"
	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/internal/sparse"
)

// The raw disk that is copied: 2,000 extents, 600 MB of data in all.
const (
	rawDisk    = 20 << 30
	rawExtents = 2000
	rawExtent  = 300 << 10
	rawRounds  = 5
	rawReads   = 2
)

// measureRawCopy copies a raw disk by its data, as a checkpoint does where the file
// system shares no blocks, in turns with cp. All end with the copy on the disk.
func measureRawCopy(ctx context.Context, _ *stage.Stage, t *table.Table) (err error) {
	dir, err := os.MkdirTemp("/tmp", "hprawcopy.")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	if err := makeRawDisk(from); err != nil {
		return err
	}
	cp := func(how string) func() error {
		return func() error {
			if err := exec.CommandContext(ctx, "cp", "--reflink=never", "--sparse="+how, from, to).Run(); err != nil {
				return fmt.Errorf("cp: %w", err)
			}
			return exec.CommandContext(ctx, "sync", to).Run()
		}
	}
	var way sparse.Way
	took, err := inTurns(rawRounds, to,
		func() (err error) { way, err = copyRawDisk(ctx, to, from); return err }, cp("always"), cp("auto"))
	if err != nil {
		return err
	}
	// Apart from the others, because it fills the host's cache with zeros.
	read, err := inTurns(rawReads, to, func() error { return readAll(from) })
	if err != nil {
		return err
	}
	ours, always, auto, whole := table.Median(took[0]), table.Median(took[1]), table.Median(took[2]), table.Median(read[0])
	ratio := table.Ratio(ours, min(always, auto))
	t.Add(table.Row{
		What:     "copy of a raw disk of 20 GiB with 600 MB in 2,000 extents, until it is on the disk",
		Measured: table.MS(ours), Against: fmt.Sprintf("cp --sparse=auto %s, --sparse=always %s, then sync; to read all of it %s", table.MS(auto), table.MS(always), table.MS(whole)),
		Ratio: ratio, Target: "≤ 1.2 × the better cp, ≥ 5 × faster than reading it all", Met: ratio <= 1.2 && whole >= 5*ours,
		Phases: fmt.Sprintf("by %s; %.1f × faster than reading it all; %d rounds", way, float64(whole)/float64(ours), rawRounds),
	})
	return nil
}

// inTurns runs each of the ways to make a file, n times after once that does not
// count, and gives how long they took.
func inTurns(n int, file string, ways ...func() error) ([][]time.Duration, error) {
	took := make([][]time.Duration, len(ways))
	for round := range n + 1 {
		for i, run := range ways {
			began := time.Now()
			if err := run(); err != nil {
				return nil, err
			}
			if round > 0 {
				took[i] = append(took[i], time.Since(began))
			}
			if err := os.RemoveAll(file); err != nil {
				return nil, err
			}
		}
	}
	return took, nil
}

func makeRawDisk(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(rawDisk); err != nil {
		return err
	}
	data, rng := make([]byte, rawExtent), rand.NewChaCha8([32]byte{})
	for i := range int64(rawExtents) {
		rng.Read(data) // never fails
		if _, err := f.WriteAt(data, i*(rawDisk/rawExtents)&^4095); err != nil {
			return err
		}
	}
	return f.Sync()
}

func copyRawDisk(ctx context.Context, to, from string) (way sparse.Way, err error) {
	source, err := os.Open(from)
	if err != nil {
		return "", err
	}
	defer source.Close()
	target, err := os.Create(to)
	if err != nil {
		return "", err
	}
	if way, err = sparse.CopyFile(ctx, target, source, func(int64, int64) {}); err == nil {
		err = target.Sync()
	}
	return way, errors.Join(err, target.Close())
}

func readAll(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, make([]byte, 1<<20))
	return err
}
