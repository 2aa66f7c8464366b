// Package errdefs names the kinds of failure that users and programs tell
// apart. It holds no policy: which exit or API code a kind gets is decided at
// the edges.
package errdefs

import (
	"context"
	"errors"
	"fmt"
)

// Kind is one of the failures that users and programs tell apart.
type Kind string

// The kinds. Their exit codes are listed in docs/cli.md.
const (
	Internal          Kind = "INTERNAL"
	Invalid           Kind = "INVALID"
	NotFound          Kind = "NOT_FOUND"
	AlreadyExists     Kind = "ALREADY_EXISTS"
	Conflict          Kind = "CONFLICT"
	RequestIDConflict Kind = "REQUEST_ID_CONFLICT"
	MachineBusy       Kind = "MACHINE_BUSY"
	WrongState        Kind = "WRONG_STATE"
	Unsupported       Kind = "UNSUPPORTED"
	KindMismatch      Kind = "KIND_MISMATCH"
	Incompatible      Kind = "INCOMPATIBLE"
	Referenced        Kind = "REFERENCED"
	OutcomeUnknown    Kind = "OUTCOME_UNKNOWN"
	NoSpace           Kind = "NO_SPACE"
	Storage           Kind = "STORAGE"
	Deadline          Kind = "DEADLINE"
	Denied            Kind = "DENIED"
	Interrupted       Kind = "INTERRUPTED"
)

// Error is a failure of a known kind. Its message is one line that says what
// failed, for which object, and what to do about it.
type Error struct {
	Kind Kind
	err  error
}

// New returns an error of the kind; format and args are those of fmt.Errorf,
// %w included.
func New(kind Kind, format string, args ...any) error {
	return &Error{Kind: kind, err: fmt.Errorf(format, args...)}
}

// As gives err the kind; nil stays nil.
func As(kind Kind, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Kind: kind, err: err}
}

// Error is the message alone; the kind is told apart from it.
func (e *Error) Error() string { return e.err.Error() }

// Unwrap gives what the message was made of.
func (e *Error) Unwrap() error { return e.err }

// KindOf returns the kind of the outermost Error in err's chain. A context's
// deadline is DEADLINE, its cancellation INTERRUPTED, anything else INTERNAL;
// nil has the kind "".
func KindOf(err error) Kind {
	var e *Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return e.Kind
	case errors.Is(err, context.DeadlineExceeded):
		return Deadline
	case errors.Is(err, context.Canceled):
		return Interrupted
	}
	return Internal
}

// Is reports whether err is of the kind.
func Is(err error, kind Kind) bool { return err != nil && KindOf(err) == kind }
