package dirty

// Strategy names a way to tell the pages that were written.
type Strategy string

// The strategies, best first. The package comment says how each works.
const (
	Userfaultfd Strategy = "userfaultfd"
	SoftDirty   Strategy = "soft-dirty"
	Untracked   Strategy = "untracked"
)

// Live reports whether the guest may run while the tracking is armed and
// scanned, without losing a write.
func (s Strategy) Live() bool { return s == Userfaultfd }

// Support is what the host has of one strategy.
type Support struct {
	Strategy  Strategy
	Available bool
	// Reason says what is missing, one line for people; empty if nothing is.
	Reason string
}

// Best is the first strategy that is available. Untracked always is.
func Best(all []Support) Strategy {
	for _, s := range all {
		if s.Available {
			return s.Strategy
		}
	}
	return Untracked
}
