package catalog

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/journal"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Last is the reference that means what was used last.
const Last = "last"

// candidate is something that a reference may mean.
type candidate struct {
	id, name, machineID, machine string
}

func scanCandidate(rows *sql.Rows) (candidate, error) {
	var c candidate
	err := rows.Scan(&c.id, &c.name, &c.machineID, &c.machine)
	return c, err
}

// label is how a candidate is shown to a person.
func (c candidate) label() string {
	switch {
	case c.machine != "" && c.name != "":
		return fmt.Sprintf("%s of %s (%s)", c.name, c.machine, c.id)
	case c.name != "":
		return fmt.Sprintf("%s (%s)", c.name, c.id)
	}
	return c.id
}

// choose picks the one that ref means: an exact name or else an exact id beats
// a prefix of either; more than one is INVALID with the candidates; none is missing.
func choose(noun, ref string, list []candidate, missing error) (candidate, error) {
	rank := func(c candidate) int {
		switch ref {
		case c.name:
			return 0
		case c.id:
			return 1
		}
		return 2
	}
	best, found := 3, []candidate(nil)
	for _, c := range list {
		switch r := rank(c); {
		case r < best:
			best, found = r, []candidate{c}
		case r == best:
			found = append(found, c)
		}
	}
	switch len(found) {
	case 0:
		return candidate{}, missing
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
	return candidate{}, errdefs.New(errdefs.Invalid, "find %s %q: it means more than one: %s; %s", noun, ref, enumerate(labels), remedy)
}

// matches is true of rows whose name or id begins with ?1.
func matches(name, id string) string {
	return fmt.Sprintf("(substr(%s, 1, length(?1)) = ?1 OR substr(%s, 1, length(?1)) = ?1)", name, id)
}

func emptyRef(noun string) error {
	return errdefs.New(errdefs.Invalid, `find %s: no name given; use a name, an id, a prefix of one, or "last"`, noun)
}

// ResolveMachine finds the machine that a person means by an exact name or id,
// an unambiguous prefix of either, or "last". None is NOT_FOUND, more than one
// INVALID with the candidates.
func (c *Catalog) ResolveMachine(ctx context.Context, ref string) (m Machine, err error) {
	if ref == "" {
		return m, emptyRef("machine")
	}
	err = c.db.View(ctx, func(q database.Querier) error {
		id := ""
		if ref == Last {
			if id, err = lastUsed(ctx, q, "machine", ""); err != nil {
				return err
			}
		} else {
			list, err := database.All(ctx, q, scanCandidate, `SELECT id, name, id, '' FROM machines WHERE `+matches("name", "id")+` ORDER BY name`, ref)
			if err != nil {
				return err
			}
			found, err := choose("machine", ref, list, noMachine(ref))
			if err != nil {
				return err
			}
			id = found.id
		}
		if m, err = getMachine(ctx, q, c.now().UnixNano(), id); errdefs.Is(err, errdefs.NotFound) {
			err = noMachine(ref)
		}
		return err
	})
	return m, err
}

// ResolveImage finds an image by name or build id, like ResolveMachine; there
// is no "last" of images.
func (c *Catalog) ResolveImage(ctx context.Context, ref string) (i Image, err error) {
	if ref == "" {
		return i, emptyRef("image")
	}
	err = c.db.View(ctx, func(q database.Querier) error {
		list, err := database.All(ctx, q, scanCandidate, `SELECT build_id, coalesce(name, ''), '', '' FROM images
			WHERE `+matches("coalesce(name, '')", "build_id")+` ORDER BY 2, 1`, ref)
		if err != nil {
			return err
		}
		found, err := choose("image", ref, list, noImage(ref))
		if err != nil {
			return err
		}
		i, err = database.One(ctx, q, noImage(ref), scanImage, selectImage+`WHERE i.build_id = ?`, found.id)
		return err
	})
	return i, err
}

// ResolveOperation finds an operation by id or prefix of it.
func (c *Catalog) ResolveOperation(ctx context.Context, ref string) (Operation, error) {
	if ref == "" {
		return Operation{}, emptyRef("operation")
	}
	list, err := database.All(ctx, c.db, scanCandidate, `SELECT id, '', '', '' FROM operations WHERE `+matches("id", "id")+` ORDER BY seq DESC`, ref)
	if err != nil {
		return Operation{}, err
	}
	found, err := choose("operation", ref, list, journal.NotFound(ref))
	if err != nil {
		return Operation{}, err
	}
	return c.GetOperation(ctx, found.id)
}

// ResolveCheckpoint finds a checkpoint of a machine, or of any when machineID
// is empty, like ResolveMachine. "last" is the one used last, in a machine
// that used none its newest. A reference that only another machine's
// checkpoint answers to is INVALID and names that machine: restoring it would
// be a fork.
func (c *Catalog) ResolveCheckpoint(ctx context.Context, machineID, ref string) (k checkpoint.Checkpoint, err error) {
	if ref == "" {
		return k, emptyRef("checkpoint")
	}
	err = c.db.View(ctx, func(q database.Querier) error {
		var id string
		if ref == Last {
			id, err = lastCheckpoint(ctx, q, machineID)
		} else {
			id, err = findCheckpoint(ctx, q, machineID, ref)
		}
		if err != nil {
			return err
		}
		if k, err = getCheckpoint(ctx, q, id); errdefs.Is(err, errdefs.NotFound) {
			err = noCheckpoint(ref)
		}
		return err
	})
	return k, err
}

func lastCheckpoint(ctx context.Context, q database.Querier, machineID string) (string, error) {
	id, err := lastUsed(ctx, q, "checkpoint", machineID)
	if err != nil || id != "" {
		return id, err
	}
	return database.One(ctx, q, noCheckpoint(Last), database.Value[string],
		`SELECT id FROM checkpoints WHERE ?1 = '' OR machine_id = ?1 ORDER BY seq DESC LIMIT 1`, machineID)
}

func findCheckpoint(ctx context.Context, q database.Querier, machineID, ref string) (string, error) {
	list, err := database.All(ctx, q, scanCandidate, `SELECT k.id, coalesce(k.name, ''), k.machine_id, m.name
		FROM checkpoints k JOIN machines m ON m.id = k.machine_id
		WHERE `+matches("coalesce(k.name, '')", "k.id")+` ORDER BY m.name, k.seq`, ref)
	if err != nil {
		return "", err
	}
	var own, foreign []candidate
	for _, c := range list {
		if machineID == "" || c.machineID == machineID {
			own = append(own, c)
		} else {
			foreign = append(foreign, c)
		}
	}
	found, err := choose("checkpoint", ref, own, noCheckpoint(ref))
	if len(own) > 0 || len(foreign) == 0 {
		return found.id, err
	}
	return "", errdefs.New(errdefs.Invalid, "find checkpoint %q: it belongs to machine %q; choose one of this machine's, see holdpoint checkpoint ls",
		ref, foreign[0].machine)
}
