package wire_test

import (
	"testing"

	"connectrpc.com/connect"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

func TestKindsSurviveTheWire(t *testing.T) {
	kinds := []errdefs.Kind{
		errdefs.Internal, errdefs.Invalid, errdefs.NotFound, errdefs.AlreadyExists, errdefs.Conflict,
		errdefs.RequestIDConflict, errdefs.MachineBusy, errdefs.WrongState, errdefs.Unsupported,
		errdefs.KindMismatch, errdefs.Incompatible, errdefs.Referenced, errdefs.OutcomeUnknown,
		errdefs.NoSpace, errdefs.Storage, errdefs.Deadline, errdefs.Denied, errdefs.Interrupted,
	}
	for _, kind := range kinds {
		sent := errdefs.New(kind, "stop machine %q: no", "web")
		encoded := wire.Encode(wire.Encode(sent))
		if got := wire.Decode(encoded); !errdefs.Is(got, kind) || got.Error() != sent.Error() {
			t.Errorf("%s arrived as %s: %v", kind, errdefs.KindOf(got), got)
		}
		if kind != errdefs.Internal && connect.CodeOf(encoded) == connect.CodeInternal {
			t.Errorf("%s has no API code of its own", kind)
		}
	}
}

func TestForeignErrorsGetTheNearestKind(t *testing.T) {
	err := wire.Decode(connect.NewError(connect.CodeNotFound, errdefs.New(errdefs.Internal, "no such file")))
	if !errdefs.Is(err, errdefs.NotFound) || err.Error() != "no such file" {
		t.Errorf("decoded %v (%s)", err, errdefs.KindOf(err))
	}
	if wire.Encode(nil) != nil || wire.Decode(nil) != nil || wire.FromInfo(nil) != nil {
		t.Error("no error became one")
	}
}
