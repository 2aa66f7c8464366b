//go:build linux

// Package mounts tells what is mounted in the guest, as its kernel lists it.
package mounts

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// Mount is one line of /proc/self/mountinfo, see proc(5).
type Mount struct {
	// Device is the file system's number, MAJOR:MINOR, the same at all of its mounts.
	Device string
	// Point is where it is mounted.
	Point string
	// Type is that of the file system, such as ext4, and Source what it is made
	// of, such as /dev/vda.
	Type, Source string
	// ReadOnly: nothing is written to the file system, at none of its mounts.
	ReadOnly bool
}

// OnDevice reports whether what is written to it ends in a block device by itself.
func (m Mount) OnDevice() bool { return strings.HasPrefix(m.Source, "/dev/") }

// List gives all mounts that this process sees, in the order of mounting.
func List() ([]Mount, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	var list []Mount
	for line := range strings.Lines(string(text)) {
		if m, ok := parse(line); ok {
			list = append(list, m)
		}
	}
	return list, nil
}

func parse(line string) (m Mount, ok bool) {
	before, after, found := strings.Cut(line, " - ")
	f, g := strings.Fields(before), strings.Fields(after)
	if !found || len(f) < 6 || len(g) < 2 {
		return m, false
	}
	m = Mount{Device: f[2], Point: Unescape(f[4]), Type: g[0], Source: g[1]}
	m.ReadOnly = len(g) > 2 && slices.Contains(strings.Split(g[2], ","), "ro")
	return m, true
}

// Unescape takes back the octal escapes of blanks in the kernel's lists of files.
func Unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}
