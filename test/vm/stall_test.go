package vm_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/test/session"
)

// TestFullDisk fills the file system that a machine's disk is on, has the guest
// write to it, and frees the space again.
func TestFullDisk(t *testing.T) {
	prepared(t)
	if session.InOwnMounts(t, 5*time.Minute) {
		fullDisk(t)
	}
}

func fullDisk(t *testing.T) {
	s := newAlive(t).Session
	// Only the layers: of a tmpfs the guest's memory could not be read, either.
	layers := filepath.Join(s.Home, "layers")
	if err := unix.Mount("small", layers, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=512m,mode=0700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(layers, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	s.Must(t, "run", "web", "--image", "debian", "--memory", "256M")
	filler := fill(t, layers)
	// The command writes more than the host has room for, and does not end.
	s.Must(t, "exec", "web", "--detach", "--", "sh", "-c",
		"yes holdpoint | head -c 64M >/root/data; sync; sha256sum </root/data >/root/sum; sync")
	const line = "stands still because the host could not write its disk (free space in "
	awaitTrouble(t, s, line)
	for _, args := range [][]string{{"exec", "web", "--", "true"}, {"stop", "web"}} {
		if r, err := s.Run(args...); err != nil || r.Code == 0 || !strings.Contains(r.Stderr, line) {
			t.Errorf("%v: %+v, %v", args, r, err)
		}
	}
	s.Must(t, "pause", "web")
	s.Must(t, "resume", "web") // it is tried, and fails
	awaitTrouble(t, s, line)
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	awaitTrouble(t, s, "")
	wantWritten(t, s)
	s.Must(t, "stop", "--force", "web")
	s.Must(t, "start", "web")
	wantWritten(t, s)
}

// wantWritten waits until the guest has written its file, and reads it again.
func wantWritten(t *testing.T, s *session.Session) {
	t.Helper()
	const check = `cd /root; echo 3 >/proc/sys/vm/drop_caches
for i in $(seq 100); do test -s sum && break; sleep 0.1; done
sha256sum <data | cmp - sum && yes holdpoint | head -c 64M | cmp - data`
	if r, err := s.Run("exec", "web", "--", "sh", "-c", check); err != nil || r.Code != 0 {
		t.Errorf("the guest's file is not what it wrote: %+v, %v", r, err)
	}
}

// fill leaves no room on the file system of dir.
func fill(t *testing.T, dir string) (path string) {
	t.Helper()
	path = filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-(4<<20)); err != nil {
		t.Fatal(err)
	}
	return path
}

// awaitTrouble waits until inspect shows trouble with the text in it, or none.
func awaitTrouble(t *testing.T, s *session.Session, text string) {
	t.Helper()
	var shown struct {
		Machine struct {
			Trouble string `json:"trouble"`
		} `json:"machine"`
	}
	for range 300 {
		s.JSON(t, &shown, "inspect", "web")
		if got := shown.Machine.Trouble; got == text || text != "" && strings.Contains(got, text) {
			t.Log(got)
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatalf("trouble is %q, want %q", shown.Machine.Trouble, text)
}
