package main

import "github.com/holdpoint/holdpoint/internal/cli"

// wire adds the daemon and the monitor.
func wire(*cli.Config) {}
