//go:build !linux

package home

// Unfit is for where daemons run.
func (h *Home) Unfit() string { return "" }
