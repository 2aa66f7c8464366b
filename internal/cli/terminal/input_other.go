//go:build !linux

package terminal

import "io"

// NewInput makes an Input of r.
func NewInput(r io.Reader) Input { return plainInput{r} }
