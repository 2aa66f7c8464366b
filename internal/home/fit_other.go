//go:build !linux

package home

// Unfit is for where daemons run.
func (h *Home) Unfit() (why, fix string) { return "", "" }
