//go:build linux

// Package oom keeps this process from being chosen when the guest runs out of
// memory, and none of those that it starts. It looks after no memory.
package oom

import (
	"fmt"
	"os"
	"sync"
)

const (
	adjustment = "/proc/self/oom_score_adj"
	// never is OOM_SCORE_ADJ_MIN of include/uapi/linux/oom.h.
	never, usual = "-1000", "0"
)

// Shield is this process's not being chosen. A nil one shields nothing.
type Shield struct{ mu sync.Mutex }

// NewShield begins to shield this process.
func NewShield() (*Shield, error) {
	s := &Shield{}
	return s, s.set(never)
}

// Without calls start without the shield, which children inherit. It is up
// again, for this process, when start returns.
func (s *Shield) Without(start func()) {
	if s == nil {
		start()
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.set(usual) // it could be set before
	defer func() { _ = s.set(never) }()
	start()
}

func (s *Shield) set(score string) error {
	if err := os.WriteFile(adjustment, []byte(score), 0); err != nil {
		return fmt.Errorf("keep from the OOM killer: %w", err)
	}
	return nil
}
