//go:build !linux

package main

import "github.com/holdpoint/holdpoint/internal/cli"

// wire leaves the configuration as it is: machines need Linux.
func wire(*cli.Config) {}
