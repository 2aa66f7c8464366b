//go:build linux

package mounts

import (
	"slices"
	"testing"
)

func TestParse(t *testing.T) {
	for line, want := range map[string]Mount{
		`36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`: {Device: "98:0", Point: "/mnt 2", Type: "ext3", Source: "/dev/root"},
		`36 35 7:0 / /snap ro shared:1 shared:2 - squashfs /dev/loop0 ro,errors=continue`:    {Device: "7:0", Point: "/snap", Type: "squashfs", Source: "/dev/loop0", ReadOnly: true},
		`36 35 0:25 / /run ro - tmpfs tmpfs rw`:                                              {Device: "0:25", Point: "/run", Type: "tmpfs", Source: "tmpfs"},
		`36 35 0:25 / /x rw - overlay overlay rw,lowerdir=/a`:                                {Device: "0:25", Point: "/x", Type: "overlay", Source: "overlay"},
		`garbage`:                  {},
		`36 35 0:25 / /x rw - ext`: {},
	} {
		m, ok := parse(line)
		if m != want || ok != (want != Mount{}) {
			t.Errorf("%q: %+v, %v", line, m, ok)
		}
	}
}

func TestList(t *testing.T) {
	list, err := List()
	if err != nil || !slices.ContainsFunc(list, func(m Mount) bool { return m.Point == "/proc" && m.Type == "proc" && !m.OnDevice() }) {
		t.Errorf("%+v, %v", list, err)
	}
}
