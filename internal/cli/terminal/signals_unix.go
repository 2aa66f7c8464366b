//go:build unix

package terminal

import (
	"os"
	"syscall"
)

// Forwarded are the signals that are passed on to a command.
func Forwarded() []os.Signal {
	return []os.Signal{
		syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH,
	}
}

// Ending are the signals that ask us to leave.
func Ending() []os.Signal { return []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} }

// Resized reports whether the signal says that the terminal has a new size.
func Resized(s os.Signal) bool { return s == syscall.SIGWINCH }

// Number is the signal's in a Linux guest (signal(7), x86); 0 for none.
func Number(s os.Signal) int32 {
	switch s {
	case syscall.SIGHUP:
		return 1
	case syscall.SIGINT:
		return 2
	case syscall.SIGQUIT:
		return 3
	case syscall.SIGUSR1:
		return 10
	case syscall.SIGUSR2:
		return 12
	case syscall.SIGTERM:
		return 15
	}
	return 0
}
