//go:build linux && !amd64

package isolation

import "errors"

// filterCalls is for the architecture that machines run on.
func filterCalls() error { return errors.New("there is no filter for this processor") }
