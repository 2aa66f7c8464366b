package terminal

import (
	"os"
	"syscall"
)

// Forwarded are the signals that are passed on to a command.
func Forwarded() []os.Signal { return Ending() }

// Ending are the signals that ask us to leave.
func Ending() []os.Signal { return []os.Signal{os.Interrupt, syscall.SIGTERM} }

// Resized reports whether the signal says that the terminal has a new size;
// Windows has no such signal.
func Resized(os.Signal) bool { return false }

// Number is the signal's in a Linux guest (signal(7), x86); 0 for none.
func Number(s os.Signal) int32 {
	switch s {
	case os.Interrupt:
		return 2
	case syscall.SIGTERM:
		return 15
	}
	return 0
}
