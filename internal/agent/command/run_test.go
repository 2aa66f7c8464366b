//go:build linux

package command

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

func TestOutput(t *testing.T) {
	family := NewFamily(false, nil)
	defer family.Close()
	s := NewSet(Config{Family: family, World: t.TempDir()})
	for script, want := range map[string]string{
		"echo out; echo err >&2":          "out\nerr\n",
		"echo said; exit 3":               "said\n!exit status 3",
		"kill -9 $$":                      "!exit status 137",
		"echo daemon; sleep 100 & exit 0": "daemon\n",
	} {
		output, err := s.Output(t.Context(), "/bin/sh", "-c", script)
		got := string(output)
		if err != nil {
			got += "!" + err.Error()
		}
		if got != want {
			t.Errorf("%s: %q", script, got)
		}
	}
	if _, err := s.Output(t.Context(), "/no/such"); err == nil {
		t.Error("no error")
	}
	output, err := s.Output(t.Context(), "/bin/sh", "-c", "yes | head -c 1000000")
	if err != nil || len(output) != maxOutput || strings.Trim(string(output), "y\n") != "" {
		t.Error(len(output), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := s.Output(ctx, "/bin/sh", "-c", "sleep 100"); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}
