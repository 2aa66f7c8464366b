//go:build !linux

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "holdpoint-agent: it runs in Linux machines only")
	os.Exit(2)
}
