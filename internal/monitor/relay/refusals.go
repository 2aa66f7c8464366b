//go:build linux

package relay

import (
	"connectrpc.com/connect"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// finalRefusals in a row are no coincidence: it takes some 2 s to get there.
const finalRefusals = 5

// Refusals counts how often in a row a guest answered what it was told when it
// was introduced, and refused it. Its user guards it.
type Refusals struct {
	row int
	why error
}

// Why is the guest's reason once that is final, "" before.
func (r *Refusals) Why() string {
	if r.why == nil {
		return ""
	}
	return r.why.Error()
}

// Kind is the kind of the reason, which is the guest's own word.
func (r *Refusals) Kind() errdefs.Kind { return errdefs.KindOf(r.why) }

// Count notes how an introduction ended. The reason for a guest that continued
// names the way to do without what it refused.
func (r *Refusals) Count(err error, continued bool) {
	switch {
	case err == nil:
		*r = Refusals{}
	case !connect.IsWireError(err):
		r.row = 0
	case r.row < finalRefusals:
		r.row++
	default:
		r.why = wire.Decode(err)
		if continued {
			r.why = errdefs.New(errdefs.KindOf(r.why), "%w; restore or fork its checkpoint with --as-is to do without its proof of identity, clock and entropy", r.why)
		}
	}
}
