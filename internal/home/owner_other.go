//go:build !unix

package home

import (
	"io/fs"
	"os"
)

// private reports whether dir is a folder; access lists are not looked at.
func private(dir string) bool {
	info, err := os.Lstat(dir)
	return err == nil && info.IsDir()
}

func ownedByRoot(fs.FileInfo) bool { return false }
