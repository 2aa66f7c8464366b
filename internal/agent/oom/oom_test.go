//go:build linux

package oom

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestShield(t *testing.T) {
	before, err := os.ReadFile(adjustment)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.WriteFile(adjustment, before, 0) })
	s, err := NewShield()
	if err != nil {
		t.Skipf("only root may: %v", err)
	}
	var child []byte
	s.Without(func() { child, err = exec.Command("cat", adjustment).Output() })
	if err != nil || strings.TrimSpace(string(child)) != usual {
		t.Errorf("a child has %q, %v", child, err)
	}
	if own, err := os.ReadFile(adjustment); err != nil || strings.TrimSpace(string(own)) != never {
		t.Errorf("this process has %q afterwards, %v", own, err)
	}
	called := false
	(*Shield)(nil).Without(func() { called = true })
	if !called {
		t.Error("without a shield nothing is started")
	}
}
