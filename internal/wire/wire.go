// Package wire carries errors with their kinds over Connect calls, and the
// messages of a stream past them. It is the one place that knows which API code
// a kind has.
package wire

import (
	"errors"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Encode gives err the API code of its kind and the kind itself as a detail.
// A Connect error from a service further in keeps what it carries.
func Encode(err error) error {
	if err == nil {
		return nil
	}
	err = Decode(err)
	encoded := connect.NewError(code(errdefs.KindOf(err)), errors.New(err.Error()))
	if detail, failed := connect.NewErrorDetail(Info(err)); failed == nil {
		encoded.AddDetail(detail)
	}
	return encoded
}

// Info is err as the outcome of an operation.
func Info(err error) *holdpointv1.ErrorInfo {
	return &holdpointv1.ErrorInfo{Kind: string(errdefs.KindOf(err)), Message: err.Error()}
}

// FromInfo is the reverse of Info; nil gives nil.
func FromInfo(info *holdpointv1.ErrorInfo) error {
	if info == nil {
		return nil
	}
	return errdefs.New(errdefs.Kind(info.GetKind()), "%s", info.GetMessage())
}

// Decode is the reverse of Encode. A Connect error without our detail gets the
// kind nearest to its code; any other error is returned as it is.
func Decode(err error) error {
	var found *connect.Error
	if !errors.As(err, &found) {
		return err
	}
	for _, detail := range found.Details() {
		message, failed := detail.Value()
		if info, ok := message.(*holdpointv1.ErrorInfo); failed == nil && ok {
			return FromInfo(info)
		}
	}
	return errdefs.New(kind(found.Code()), "%s", found.Message())
}

func code(kind errdefs.Kind) connect.Code {
	switch kind {
	case errdefs.Invalid:
		return connect.CodeInvalidArgument
	case errdefs.NotFound:
		return connect.CodeNotFound
	case errdefs.AlreadyExists, errdefs.RequestIDConflict:
		return connect.CodeAlreadyExists
	case errdefs.Conflict, errdefs.MachineBusy:
		return connect.CodeAborted
	case errdefs.WrongState, errdefs.Referenced, errdefs.KindMismatch, errdefs.Incompatible:
		return connect.CodeFailedPrecondition
	case errdefs.Unsupported:
		return connect.CodeUnimplemented
	case errdefs.OutcomeUnknown:
		return connect.CodeUnknown
	case errdefs.NoSpace:
		return connect.CodeResourceExhausted
	case errdefs.Storage:
		return connect.CodeDataLoss
	case errdefs.Deadline:
		return connect.CodeDeadlineExceeded
	case errdefs.Denied:
		return connect.CodePermissionDenied
	case errdefs.Interrupted:
		return connect.CodeCanceled
	}
	return connect.CodeInternal
}

func kind(code connect.Code) errdefs.Kind {
	switch code {
	case connect.CodeInvalidArgument, connect.CodeOutOfRange:
		return errdefs.Invalid
	case connect.CodeNotFound:
		return errdefs.NotFound
	case connect.CodeAlreadyExists:
		return errdefs.AlreadyExists
	case connect.CodeAborted:
		return errdefs.Conflict
	case connect.CodeFailedPrecondition:
		return errdefs.WrongState
	case connect.CodeUnimplemented:
		return errdefs.Unsupported
	case connect.CodeResourceExhausted:
		return errdefs.NoSpace
	case connect.CodeDataLoss:
		return errdefs.Storage
	case connect.CodeDeadlineExceeded:
		return errdefs.Deadline
	case connect.CodePermissionDenied, connect.CodeUnauthenticated:
		return errdefs.Denied
	case connect.CodeCanceled:
		return errdefs.Interrupted
	}
	return errdefs.Internal
}
