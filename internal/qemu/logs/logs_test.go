//go:build linux

package logs

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPunchKeepsTheEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events")
	data := make([]byte, 1<<20)
	for i := range data {
		data[i] = byte(rand.IntN(255) + 1)
	}
	event := []byte("\n" + `{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-reset"}}` + "\r\n")
	must(t, os.WriteFile(path, append(data, event...), 0o600))
	must(t, punch(path, 2<<20, 64<<10))
	if got, _ := os.ReadFile(path); !bytes.Equal(got[:1<<20], data) {
		t.Error("a short file was changed")
	}
	must(t, punch(path, 512<<10, 64<<10))
	got, err := os.ReadFile(path)
	if err != nil || len(got) != len(data)+len(event) || !bytes.HasSuffix(got, event) || got[0] != 0 {
		t.Errorf("%d bytes, first %d, %v", len(got), got[0], err)
	}
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	if st.Blocks*512 > 256<<10 {
		t.Errorf("%d bytes are still allocated", st.Blocks*512)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
