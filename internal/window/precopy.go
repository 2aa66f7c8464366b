//go:build linux

package window

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const (
	// maxRounds is how often memory is copied before the window: a guest that
	// leaves more than littleLeft after so many leaves no less after more.
	maxRounds = 3
	// littleLeft, in bytes, takes no longer to copy than the devices take to
	// save, which happens beside it (2 and 5 ms).
	littleLeft = 4 << 20
	// spare is what the disk must have beyond the pages, in bytes: the state of
	// the devices (0.3 MiB), and pages that are written meanwhile.
	spare = 16 << 20
	// enoughToJudge is the least that must have been copied to tell from it
	// how fast copying is, in bytes.
	enoughToJudge = 1 << 20
)

// prepare does what can be done before the guest is stopped for the window.
func (t *taking) prepare(ctx context.Context) error {
	rounds := maxRounds
	switch s := t.Memory.Strategy(); {
	case s == dirty.Untracked:
		rounds = 1 // it reports everything again; this one shows how long that takes
		fallthrough
	case !s.Live():
		if err := t.enter(ctx); err != nil {
			return err
		}
	}
	if err := t.sync(ctx); err != nil {
		return err
	}
	began := time.Now()
	if err := t.first(ctx); err != nil {
		return err
	}
	if err := t.checkSpace(); err != nil {
		return err
	}
	for t.result.Rounds < rounds && (t.result.Rounds == 0 || t.todo.Bytes() > littleLeft) {
		t.result.Rounds++
		if err := t.out.copyLive(ctx, t.todo); err != nil {
			return err
		}
		t.todo.Clear()
		if err := t.look(ctx, t.scan); err != nil {
			return err
		}
	}
	t.result.Precopy, t.result.PrecopiedBytes = time.Since(began), t.out.copied
	if err := t.checkRate(); err != nil {
		return err
	}
	return t.sync(ctx)
}

func (t *taking) sync(ctx context.Context) error {
	if t.SyncDisk == nil {
		return nil
	}
	began := time.Now()
	err := t.SyncDisk(ctx)
	t.result.SyncDisk += time.Since(began)
	return err
}

// first finds all pages that are wanted.
func (t *taking) first(ctx context.Context) error {
	find := t.scan
	if t.Rebase || !t.Book.Known() {
		find = t.arm
	}
	if t.Base != nil {
		t.Book.Add(t.Base)
	}
	if err := t.look(ctx, find); err != nil {
		return err
	}
	t.todo = t.Book.Pages()
	return nil
}

// look calls find, while the guest stands still if the tracking needs that.
func (t *taking) look(ctx context.Context, find func() error) error {
	if t.wasPaused || t.Memory.Strategy().Live() {
		return find()
	}
	limited, cancel := context.WithTimeout(ctx, t.Deadline)
	defer cancel()
	err := t.Run.Pause(limited)
	if err == nil {
		err = find()
	}
	return t.letGo(ctx, err)
}

// arm begins to count anew.
func (t *taking) arm() error {
	pages, err := t.Memory.Arm()
	if err != nil {
		t.Book.Lost()
		return err
	}
	t.Book.Rebase(pages)
	t.todo.Or(pages)
	return nil
}

// scan adds what was written since the last look.
func (t *taking) scan() error {
	pages, err := t.Memory.Scan()
	if err != nil {
		t.Book.Lost()
		return err
	}
	t.Book.Add(pages)
	t.todo.Or(pages)
	return nil
}

// checkSpace refuses what would fill the disk.
func (t *taking) checkSpace() error {
	free := t.Free
	if free == nil {
		free = freeBytes
	}
	have, err := free(t.Dir)
	if err != nil {
		return errdefs.New(errdefs.Storage, "ask for the free space of %q: %w", t.Dir, err)
	}
	if need := t.todo.Bytes() + spare; have < need {
		return errdefs.New(errdefs.NoSpace, "copy memory to %q: %d MiB are needed, %d MiB are free; free some, for example with holdpoint gc", t.Dir, need>>20, have>>20)
	}
	return nil
}

func freeBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// checkRate refuses a window in which what is left could not be copied.
func (t *taking) checkRate() error {
	if t.out.copied < enoughToJudge {
		return nil
	}
	left := t.todo.Bytes()
	needs := time.Duration(float64(t.out.spent) / float64(t.out.copied) * float64(left))
	if needs <= t.Deadline*3/4 { // the devices need the rest
		return nil
	}
	rate := float64(t.out.copied) / max(t.out.spent.Seconds(), 1e-9) / (1 << 20)
	return errdefs.New(errdefs.Deadline,
		"open window: %d MiB that the guest has just written are left, which take %s at the measured %.0f MiB/s, longer than the %s the window may be open; try again when it writes less",
		left>>20, needs.Round(time.Millisecond), rate, t.Deadline)
}

// ended makes an error of a context one of its kind that says what it stopped.
func ended(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return errdefs.As(errdefs.KindOf(err), fmt.Errorf("copy memory: %w", err))
	}
	return nil
}
