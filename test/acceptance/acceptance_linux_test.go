package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func problem(t *testing.T, p part, want string) {
	t.Helper()
	if err := p.report(&Report{}); want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("report says %v, want %q", err, want)
	}
}

func TestMemoryFindsWhatWasLost(t *testing.T) {
	m, err := newMemory(64 * pageBytes)
	if err != nil {
		t.Fatal(err)
	}
	old := append([]byte(nil), m.page(5)...)
	for i := range 64 {
		m.change(i % 7)
	}
	problem(t, m, "")
	now := append([]byte(nil), m.page(5)...)
	copy(m.page(5), old)
	problem(t, m, "memory page 5 should have version 9, but has version 0 of page 5")
	copy(m.page(5), now)
	problem(t, m, "")
	m.page(63)[4095] ^= 1
	problem(t, m, "memory has digest")
}

func TestJumpIsManySteps(t *testing.T) {
	state := uint64(0)
	for n := range uint64(1000) {
		if got := jump(n); got != state {
			t.Fatalf("jump(%d) = %x, want %x", n, got, state)
		}
		state = state*lcgFactor + lcgAdd
	}
}

func TestFileFindsWhatWasLost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "records")
	p, err := startFile(path)
	if err != nil {
		t.Fatal(err)
	}
	problem(t, p, "")
	f := p.(*file)
	f.mu.Lock()
	err = os.WriteFile(path, []byte("00000000000000x"), 0o600)
	f.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	problem(t, p, "the file has")
}

func TestReportsAreCompared(t *testing.T) {
	earlier := Report{Nonce: "a", Starts: 1, Counters: []uint64{5, 6}, Ticks: 7}
	same := earlier
	if same.compare(earlier); len(same.Problems) != 0 {
		t.Error(same.Problems)
	}
	later := Report{Nonce: "b", Starts: 2, Counters: []uint64{6, 5}, Ticks: 8}
	later.compare(earlier)
	text := strings.Join(later.Problems, "\n")
	for _, want := range []string{"started again", "counter of CPU 1 went from 6 back to 5"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q does not say %q", text, want)
		}
	}
	if len(later.Problems) != 2 {
		t.Error(later.Problems)
	}
}
