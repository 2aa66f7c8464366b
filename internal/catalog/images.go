package catalog

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/journal"
	"github.com/holdpoint/holdpoint/internal/catalog/ready"
	"github.com/holdpoint/holdpoint/internal/catalog/reference"
	"github.com/holdpoint/holdpoint/internal/catalog/rows"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const selectImage = `SELECT i.build_id, coalesce(i.name, ''), i.architecture, i.kernel_version, i.disk_bytes, i.stored_bytes,
	i.packages, i.description, i.created_at,
	(SELECT count(*) FROM machines m WHERE m.image_build_id = i.build_id) +
	(SELECT count(*) FROM checkpoints k WHERE k.image_build_id = i.build_id AND k.machine_id IS NOT NULL) FROM images i `

func scanImage(rows *sql.Rows) (Image, error) {
	var (
		i        Image
		packages []byte
		created  int64
	)
	err := rows.Scan(&i.BuildID, &i.Name, &i.Architecture, &i.KernelVersion, &i.DiskBytes, &i.StoredBytes,
		&packages, &i.Description, &created, &i.UsedBy)
	if err != nil {
		return i, err
	}
	i.CreatedAt = database.Time(created)
	if err := json.Unmarshal(packages, &i.Packages); err != nil {
		return i, errdefs.New(errdefs.Storage, "read packages of image %q: %w", i.BuildID, err)
	}
	return i, nil
}

// PutImage records an image, whose files are in place, or records anew the one
// of the same build id. Its name, if it has one, moves to it from an older build.
func (c *Catalog) PutImage(ctx context.Context, i Image) error {
	packages, err := json.Marshal(append([]string{}, i.Packages...))
	if err != nil {
		return fmt.Errorf("record image %q: %w", i.BuildID, err)
	}
	return c.db.Write(ctx, "put-image", func(t *database.Tx) error {
		if err := t.Do(`UPDATE images SET name = NULL WHERE name = ? AND build_id <> ?`, i.Name, i.BuildID); err != nil {
			return err
		}
		return t.Do(`INSERT INTO images VALUES (?, nullif(?, ''), ?, ?, ?, ?, ?, ?, ?)
			ON CONFLICT (build_id) DO UPDATE SET name = coalesce(excluded.name, name), architecture = excluded.architecture,
			kernel_version = excluded.kernel_version, disk_bytes = excluded.disk_bytes, stored_bytes = excluded.stored_bytes,
			packages = excluded.packages, description = excluded.description, created_at = excluded.created_at`,
			i.BuildID, i.Name, i.Architecture, i.KernelVersion, i.DiskBytes, i.StoredBytes, string(packages), i.Description, t.OrNow(i.CreatedAt))
	})
}

// GetImage gives the image of a build id; NOT_FOUND if there is none.
func (c *Catalog) GetImage(ctx context.Context, buildID string) (Image, error) {
	return database.One(ctx, c.db, rows.NoImage(buildID), scanImage, selectImage+`WHERE i.build_id = ?`, buildID)
}

// ListImages gives all images, newest first.
func (c *Catalog) ListImages(ctx context.Context) ([]Image, error) {
	return database.All(ctx, c.db, scanImage, selectImage+`ORDER BY i.created_at DESC, i.build_id`)
}

// RemoveImage forgets an image with its booted checkpoints. One that machines,
// checkpoints or operations other than opID need is REFERENCED, and the error
// names them.
func (c *Catalog) RemoveImage(ctx context.Context, buildID, opID string) error {
	return c.db.Write(ctx, "remove-image", func(t *database.Tx) error {
		img, err := database.One(ctx, t, rows.NoImage(buildID), scanImage, selectImage+`WHERE i.build_id = ?`, buildID)
		if err != nil {
			return err
		}
		what := fmt.Sprintf("remove image %q", cmp.Or(img.Name, img.BuildID))
		users, err := database.All(ctx, t, database.Value[string], `
			SELECT 'machine ' || name FROM machines WHERE image_build_id = ?1
			UNION SELECT 'checkpoint ' || coalesce(k.name, k.id) || ' of ' || m.name
				FROM checkpoints k JOIN machines m ON m.id = k.machine_id WHERE k.image_build_id = ?1
			UNION SELECT 'operation ' || operation_id FROM displaced WHERE image_build_id = ?1
			ORDER BY 1`, buildID)
		if err != nil {
			return err
		}
		if len(users) > 0 {
			return errdefs.New(errdefs.Referenced, "%s: needed by %s; remove them first", what, reference.Enumerate(users))
		}
		if err := journal.RefuseLeased(t, ImageResource, buildID, opID, what); err != nil {
			return err
		}
		if err := ready.DropBoots(t, what, opID, `image_build_id = ?`, buildID); err != nil {
			return err
		}
		return t.Do(`DELETE FROM images WHERE build_id = ?`, buildID)
	})
}

func requireImage(t *database.Tx, buildID string) error {
	_, err := database.One(t.Ctx, t, rows.NoImage(buildID), database.Value[string], `SELECT build_id FROM images WHERE build_id = ?`, buildID)
	return err
}
