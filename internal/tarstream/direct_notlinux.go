//go:build !linux

package tarstream

import "os"

func setDirect(*os.File, bool) bool { return false }

func readCached(*os.File, []byte, int64) int { return 0 }

func refusedDirect(error) bool { return false }
