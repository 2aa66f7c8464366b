//go:build !linux

package store

import "os"

// adopt finds no file that is surely nobody else's.
func adopt(string, int64) *os.File { return nil }

func (m *materialization) clear(*os.File) error { return nil }
