//go:build linux

package agent

import (
	"io/fs"
	"syscall"
)

func owner(fi fs.FileInfo) uint32 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Uid
	}
	return 0
}
