//go:build linux

// Package gauge reads from the guest's kernel what the guest uses of its memory
// and network. It asks nobody else and keeps nothing.
package gauge

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
)

// Read tells what is used now.
func Read() (*agentv1.UsageResponse, error) {
	memory, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return nil, fmt.Errorf("read what memory is used: %w", err)
	}
	u := &agentv1.UsageResponse{
		MemoryBytes: field(memory, "MemTotal:") << 10, MemoryAvailableBytes: field(memory, "MemAvailable:") << 10,
	}
	devices, err := os.ReadFile("/proc/net/dev")
	if err != nil {
		return nil, fmt.Errorf("read what the network carries: %w", err)
	}
	u.ReceivedBytes, u.SentBytes = traffic(devices)
	return u, nil
}

// field is the number after a name in /proc/meminfo; 0 for none.
func field(text []byte, name string) uint64 {
	for line := range strings.Lines(string(text)) {
		if rest, found := strings.CutPrefix(line, name); found {
			return number(strings.Fields(rest), 0)
		}
	}
	return 0
}

// traffic sums /proc/net/dev: of each device received bytes are the first
// number, and sent ones the ninth.
func traffic(text []byte) (received, sent uint64) {
	for line := range strings.Lines(string(text)) {
		name, counts, found := strings.Cut(line, ":")
		if !found || strings.TrimSpace(name) == "lo" {
			continue
		}
		f := strings.Fields(counts)
		received += number(f, 0)
		sent += number(f, 8)
	}
	return received, sent
}

func number(fields []string, i int) uint64 {
	if i >= len(fields) {
		return 0
	}
	n, _ := strconv.ParseUint(fields[i], 10, 64) // 0 where the kernel speaks otherwise
	return n
}
