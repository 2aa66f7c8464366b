package errdefs_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestKindOf(t *testing.T) {
	inner := errdefs.New(errdefs.NotFound, "find machine %q", "web")
	tests := []struct {
		err  error
		want errdefs.Kind
	}{
		{nil, ""},
		{io.EOF, errdefs.Internal},
		{inner, errdefs.NotFound},
		{fmt.Errorf("restore: %w", inner), errdefs.NotFound},
		{errdefs.As(errdefs.Storage, inner), errdefs.Storage},
		{errors.Join(io.EOF, inner), errdefs.NotFound},
		{context.DeadlineExceeded, errdefs.Deadline},
		{fmt.Errorf("wait: %w", context.Canceled), errdefs.Interrupted},
	}
	for _, test := range tests {
		if got := errdefs.KindOf(test.err); got != test.want {
			t.Errorf("KindOf(%v) = %s, want %s", test.err, got, test.want)
		}
	}
}

func TestWrappedErrorsAreFound(t *testing.T) {
	err := errdefs.New(errdefs.Storage, "read: %w; and close: %w", io.EOF, io.ErrClosedPipe)
	if !errors.Is(err, io.EOF) || !errors.Is(err, io.ErrClosedPipe) {
		t.Error("what the message was made of is not found")
	}
	if err.Error() != "read: EOF; and close: io: read/write on closed pipe" {
		t.Errorf("message %q", err)
	}
	if errdefs.As(errdefs.Storage, nil) != nil {
		t.Error("no error became one")
	}
}
