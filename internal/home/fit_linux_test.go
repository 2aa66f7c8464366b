package home_test

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/home"
)

// A home in memory is said to be none that lasts; one on a disk is fine.
func TestUnfit(t *testing.T) {
	for where, name := range map[string]string{"/dev/shm": "tmpfs", ".": ""} {
		var st unix.Statfs_t
		if err := unix.Statfs(where, &st); err != nil || (name != "") != (st.Type == unix.TMPFS_MAGIC) {
			t.Logf("%s is something else here", where)
			continue
		}
		dir, err := os.MkdirTemp(where, "hp")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		t.Setenv("XDG_RUNTIME_DIR", dir)
		h, err := home.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		why, fix := h.Unfit()
		if (why != "") != (name != "") || !strings.Contains(why, name) || name != "" && !strings.Contains(fix, "set HOLDPOINT_HOME to a folder on a disk") {
			t.Errorf("%s: %q, %q", where, why, fix)
		}
	}
}
