package reserve_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/holdpoint/holdpoint/internal/daemon/reserve"
)

func TestReserve(t *testing.T) {
	path := filepath.Join(t.TempDir(), "reserve")
	r := reserve.New(path)
	if r.Release() {
		t.Error("released what was not kept back")
	}
	for range 2 {
		if err := r.Fill(); err != nil {
			t.Fatal(err)
		}
	}
	var stat syscall.Stat_t
	if err := syscall.Stat(path, &stat); err != nil || stat.Blocks*512 < 8<<20 {
		t.Errorf("%d bytes are kept back, %v", stat.Blocks*512, err)
	}
	if !r.Release() {
		t.Error("nothing was released")
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("the file is still there: %v", err)
	}
}
