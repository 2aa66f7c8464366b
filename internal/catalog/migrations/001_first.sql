-- Version 1. Times are Unix nanoseconds, 0 for "not yet". JSON is text. Ids
-- are 16 lower-case hexadecimal digits, a build id is the image's own.

-- What machines start from. A name moves to the newer build and leaves the
-- older one without a name; a build goes when nothing needs it.
CREATE TABLE images (
  build_id       TEXT PRIMARY KEY,
  name           TEXT UNIQUE,
  architecture   TEXT NOT NULL,
  kernel_version TEXT NOT NULL,
  disk_bytes     INTEGER NOT NULL, -- the root disk as a guest sees it
  stored_bytes   INTEGER NOT NULL, -- on the host
  packages       TEXT NOT NULL,    -- JSON array
  description    TEXT NOT NULL,
  created_at     INTEGER NOT NULL
) STRICT;

-- A guest with an identity. run_id is the run begun last, exit why it ended;
-- generation counts restores and only grows.
CREATE TABLE machines (
  id              TEXT PRIMARY KEY,
  name            TEXT NOT NULL UNIQUE,
  image_build_id  TEXT NOT NULL REFERENCES images (build_id),
  spec            TEXT NOT NULL, -- JSON
  state           TEXT NOT NULL CHECK (state IN ('creating', 'running', 'paused', 'stopped', 'unknown')),
  generation      INTEGER NOT NULL,
  run_id          TEXT NOT NULL,
  exit            TEXT NOT NULL,
  link_magic      TEXT NOT NULL, -- 32 hexadecimal digits
  head_checkpoint TEXT REFERENCES checkpoints (id), -- what the disk continues from; NULL: the image
  created_at      INTEGER NOT NULL
) STRICT;
CREATE INDEX machines_image ON machines (image_build_id);
CREATE INDEX machines_head ON machines (head_checkpoint);

-- One file of a disk above the image. created: recorded, nothing in it counts
-- yet; live: a run writes it, or did; sealed: read-only for good.
CREATE TABLE layers (
  id            TEXT PRIMARY KEY,
  machine_id    TEXT NOT NULL, -- whose run wrote it; the layer may outlive it
  path          TEXT NOT NULL UNIQUE, -- below the home, final from the start
  format        TEXT NOT NULL,
  virtual_bytes INTEGER NOT NULL,
  stored_bytes  INTEGER NOT NULL,
  state         TEXT NOT NULL CHECK (state IN ('created', 'live', 'sealed')),
  digest        TEXT, -- sha256:…, of a sealed one, when it was computed
  created_at    INTEGER NOT NULL
) STRICT;

-- The live chain of a machine, lowest first. The highest position is the
-- writable top; an overlay is recorded as the top before anything uses it, so
-- the longest recorded chain is always the one to boot.
CREATE TABLE chains (
  machine_id TEXT NOT NULL REFERENCES machines (id),
  position   INTEGER NOT NULL,
  layer_id   TEXT NOT NULL REFERENCES layers (id),
  PRIMARY KEY (machine_id, position),
  UNIQUE (machine_id, layer_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX chains_layer ON chains (layer_id);

-- Immutable once here, but for parent: the children of a forgotten checkpoint
-- become children of its parent. seq is the order of publishing.
CREATE TABLE checkpoints (
  seq               INTEGER PRIMARY KEY AUTOINCREMENT,
  id                TEXT NOT NULL UNIQUE,
  machine_id        TEXT NOT NULL REFERENCES machines (id),
  name              TEXT,
  kind              TEXT NOT NULL CHECK (kind IN ('disk', 'full')),
  consistency       TEXT NOT NULL,
  parent            TEXT,
  message           TEXT NOT NULL,
  automatic         INTEGER NOT NULL, -- made by a restore, for its undo
  spec              TEXT NOT NULL, -- JSON
  image_build_id    TEXT NOT NULL REFERENCES images (build_id),
  disk_bytes        INTEGER NOT NULL,
  session_id        TEXT NOT NULL,
  prompt_id         TEXT NOT NULL,
  tool_call_id      TEXT NOT NULL,
  tool_name         TEXT NOT NULL,
  transcript_offset INTEGER NOT NULL,
  created_at        INTEGER NOT NULL,
  UNIQUE (machine_id, name)
) STRICT;
CREATE INDEX checkpoints_parent ON checkpoints (parent);
CREATE INDEX checkpoints_image ON checkpoints (image_build_id);

-- The disk of a checkpoint above its image, lowest first; all sealed.
CREATE TABLE checkpoint_layers (
  checkpoint_id TEXT NOT NULL REFERENCES checkpoints (id),
  position      INTEGER NOT NULL,
  layer_id      TEXT NOT NULL REFERENCES layers (id),
  PRIMARY KEY (checkpoint_id, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX checkpoint_layers_layer ON checkpoint_layers (layer_id);

-- The machine's routes at that instant, for comparison only.
CREATE TABLE checkpoint_routes (
  checkpoint_id TEXT NOT NULL REFERENCES checkpoints (id),
  host          TEXT NOT NULL,
  port          INTEGER NOT NULL,
  listening     INTEGER NOT NULL,
  PRIMARY KEY (checkpoint_id, host)
) STRICT, WITHOUT ROWID;

-- Published host names. A machine's routes go with it.
CREATE TABLE routes (
  host       TEXT PRIMARY KEY,
  machine_id TEXT NOT NULL REFERENCES machines (id),
  port       INTEGER NOT NULL,
  created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX routes_machine ON routes (machine_id);

-- The journal. An operation is admitted before its first effect; phase and
-- detail say how far it came, so that a later daemon can finish or undo it.
CREATE TABLE operations (
  seq            INTEGER PRIMARY KEY AUTOINCREMENT,
  id             TEXT NOT NULL UNIQUE,
  request_id     TEXT NOT NULL UNIQUE,
  verb           TEXT NOT NULL,
  options        TEXT NOT NULL, -- JSON
  options_digest TEXT NOT NULL, -- sha256 over verb and canonical options
  machine_id     TEXT NOT NULL, -- the machine may be gone
  machine_name   TEXT NOT NULL,
  phase          TEXT NOT NULL,
  state          TEXT NOT NULL CHECK (state IN ('running', 'done', 'failed', 'canceled')),
  detail         TEXT NOT NULL, -- JSON, of the verb's own
  error_kind     TEXT NOT NULL,
  error_message  TEXT NOT NULL,
  result         TEXT NOT NULL, -- JSON
  created_at     INTEGER NOT NULL,
  ended_at       INTEGER NOT NULL
) STRICT;
CREATE INDEX operations_ended ON operations (seq) WHERE state <> 'running';
CREATE INDEX operations_running ON operations (seq) WHERE state = 'running';
CREATE INDEX operations_machine ON operations (machine_id);

-- What running operations claim. An expired lease may be taken over, and still
-- keeps its object from being collected until its operation has ended.
CREATE TABLE leases (
  kind         TEXT NOT NULL CHECK (kind IN ('machine', 'checkpoint', 'layer', 'image')),
  resource_id  TEXT NOT NULL,
  operation_id TEXT NOT NULL REFERENCES operations (id),
  exclusive    INTEGER NOT NULL,
  expires_at   INTEGER NOT NULL,
  PRIMARY KEY (kind, resource_id, operation_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX leases_operation ON leases (operation_id);

-- What a restore took from a machine, kept until the restore has ended.
CREATE TABLE displaced (
  operation_id    TEXT PRIMARY KEY REFERENCES operations (id),
  machine_id      TEXT NOT NULL REFERENCES machines (id),
  image_build_id  TEXT NOT NULL REFERENCES images (build_id),
  spec            TEXT NOT NULL,
  run_id          TEXT NOT NULL,
  head_checkpoint TEXT,
  routes_replaced INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE displaced_layers (
  operation_id TEXT NOT NULL REFERENCES displaced (operation_id),
  position     INTEGER NOT NULL,
  layer_id     TEXT NOT NULL REFERENCES layers (id),
  PRIMARY KEY (operation_id, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX displaced_layers_layer ON displaced_layers (layer_id);
CREATE TABLE displaced_routes (
  operation_id TEXT NOT NULL REFERENCES displaced (operation_id),
  host         TEXT NOT NULL,
  port         INTEGER NOT NULL,
  created_at   INTEGER NOT NULL,
  PRIMARY KEY (operation_id, host)
) STRICT, WITHOUT ROWID;

-- What "last" means. scope is empty for the whole home, or a machine's id.
CREATE TABLE last_used (
  kind        TEXT NOT NULL CHECK (kind IN ('machine', 'checkpoint')),
  scope       TEXT NOT NULL,
  resource_id TEXT NOT NULL,
  PRIMARY KEY (kind, scope)
) STRICT, WITHOUT ROWID;
