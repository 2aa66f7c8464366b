// Package reference decides what a person means who typed a name, an id, or
// the beginning of one. It looks nothing up: the candidates come from the
// catalog.
package reference

import (
	"database/sql"
	"fmt"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Candidate is something that a reference may mean.
type Candidate struct {
	ID, Name string
	// MachineID and Machine, its name, are empty for what is not a machine's.
	MachineID, Machine string
}

// Scan reads a candidate from its four columns.
func Scan(rows *sql.Rows) (Candidate, error) {
	var c Candidate
	err := rows.Scan(&c.ID, &c.Name, &c.MachineID, &c.Machine)
	return c, err
}

// label is how a Candidate is shown to a person.
func (c Candidate) label() string {
	switch {
	case c.Machine != "" && c.Name != "":
		return fmt.Sprintf("%s of %s (%s)", c.Name, c.Machine, c.ID)
	case c.Name != "":
		return fmt.Sprintf("%s (%s)", c.Name, c.ID)
	}
	return c.ID
}

// Choose picks the one that ref means: an exact name or else an exact id beats
// a prefix of either; more than one is INVALID with the Candidates; none is what missing says.
func Choose(noun, ref string, list []Candidate, missing func() error) (Candidate, error) {
	rank := func(c Candidate) int {
		switch ref {
		case c.Name:
			return 0
		case c.ID:
			return 1
		}
		return 2
	}
	best, found := 3, []Candidate(nil)
	for _, c := range list {
		switch r := rank(c); {
		case r < best:
			best, found = r, []Candidate{c}
		case r == best:
			found = append(found, c)
		}
	}
	switch len(found) {
	case 0:
		return Candidate{}, missing()
	case 1:
		return found[0], nil
	}
	labels := make([]string, 0, len(found))
	for _, c := range found {
		labels = append(labels, c.label())
	}
	remedy := "type more of it"
	if best == 0 {
		remedy = "name its machine, or use the id"
	}
	return Candidate{}, errdefs.New(errdefs.Invalid, "find %s %q: it means more than one: %s; %s", noun, ref, Enumerate(labels), remedy)
}

// Matches is true of rows whose name or id begins with ?1.
func Matches(name, id string) string {
	return fmt.Sprintf("(substr(%s, 1, length(?1)) = ?1 OR substr(%s, 1, length(?1)) = ?1)", name, id)
}

// Empty is the error of a reference without a letter.
func Empty(noun string) error {
	return errdefs.New(errdefs.Invalid, `find %s: no name given; use a name, an id, a prefix of one, or "last"`, noun)
}

// Enumerate joins a list for one line, the first five by name.
func Enumerate(list []string) string {
	const most = 5
	if len(list) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(list[:most], ", "), len(list)-most)
	}
	return strings.Join(list, ", ")
}
