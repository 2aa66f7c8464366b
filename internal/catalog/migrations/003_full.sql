-- Version 3. Full checkpoints: memory layers, suspended machines, forks, image
-- boots, pools. machines and checkpoints are made anew, because SQLite changes
-- neither a CHECK nor a NOT NULL in place.
--
-- The format of a layer may be memory or devices now, besides qcow2 and raw;
-- one of these is never in a chain.

-- memory_head is the full checkpoint that machine_memory is the memory of; it
-- may be forgotten meanwhile. memory_file is the top memory layer whose memory
-- file the present run maps, empty for a booted one.
CREATE TABLE machines_new (
  id              TEXT PRIMARY KEY,
  name            TEXT NOT NULL UNIQUE,
  image_build_id  TEXT NOT NULL REFERENCES images (build_id),
  spec            TEXT NOT NULL, -- JSON
  state           TEXT NOT NULL CHECK (state IN ('creating', 'running', 'paused', 'stopped', 'suspended', 'unknown')),
  generation      INTEGER NOT NULL,
  run_id          TEXT NOT NULL,
  exit            TEXT NOT NULL,
  link_magic      TEXT NOT NULL, -- 32 hexadecimal digits
  head_checkpoint TEXT REFERENCES checkpoints (id), -- what the disk continues from; NULL: the image
  memory_head     TEXT NOT NULL,
  memory_file     TEXT NOT NULL,
  forked_from     TEXT NOT NULL, -- a checkpoint, which may be gone; empty for none
  remove_on_stop  INTEGER NOT NULL,
  created_at      INTEGER NOT NULL
) STRICT;
INSERT INTO machines_new SELECT id, name, image_build_id, spec, state, generation, run_id, exit, link_magic, head_checkpoint,
  '', '', '', 0, created_at FROM machines;
DROP TABLE machines;
ALTER TABLE machines_new RENAME TO machines;
CREATE INDEX machines_image ON machines (image_build_id);
CREATE INDEX machines_head ON machines (head_checkpoint);

-- Immutable once here, but for parent, as before. One without a machine is an
-- image's booted checkpoint, which no list shows.
CREATE TABLE checkpoints_new (
  seq               INTEGER PRIMARY KEY AUTOINCREMENT,
  id                TEXT NOT NULL UNIQUE,
  machine_id        TEXT REFERENCES machines (id),
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
INSERT INTO checkpoints_new SELECT * FROM checkpoints;
DROP TABLE checkpoints;
ALTER TABLE checkpoints_new RENAME TO checkpoints;
CREATE INDEX checkpoints_parent ON checkpoints (parent);
CREATE INDEX checkpoints_image ON checkpoints (image_build_id);

-- What a full checkpoint has besides its disk. verification and problem are
-- the only columns that change.
CREATE TABLE checkpoint_full (
  checkpoint_id TEXT PRIMARY KEY REFERENCES checkpoints (id),
  devices_layer TEXT NOT NULL REFERENCES layers (id),
  memory_bytes  INTEGER NOT NULL, -- its own memory layer, on the host
  tracking      TEXT NOT NULL,
  platform      TEXT NOT NULL, -- JSON
  link_magic    TEXT NOT NULL, -- 32 hexadecimal digits
  unconfigured  INTEGER NOT NULL,
  verification  TEXT NOT NULL CHECK (verification IN ('unverified', 'verified', 'failed')),
  problem       TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX checkpoint_full_devices ON checkpoint_full (devices_layer);

-- The memory of a full checkpoint, lowest first; all sealed.
CREATE TABLE checkpoint_memory (
  checkpoint_id TEXT NOT NULL REFERENCES checkpoints (id),
  position      INTEGER NOT NULL,
  layer_id      TEXT NOT NULL REFERENCES layers (id),
  PRIMARY KEY (checkpoint_id, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX checkpoint_memory_layer ON checkpoint_memory (layer_id);

-- The memory since which the pages of the present run are counted, lowest
-- first; that a suspended machine goes on from.
CREATE TABLE machine_memory (
  machine_id TEXT NOT NULL REFERENCES machines (id),
  position   INTEGER NOT NULL,
  layer_id   TEXT NOT NULL REFERENCES layers (id),
  PRIMARY KEY (machine_id, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX machine_memory_layer ON machine_memory (layer_id);

-- What a restore took from a machine, besides its disk.
ALTER TABLE displaced ADD COLUMN memory_head TEXT NOT NULL DEFAULT '';
ALTER TABLE displaced ADD COLUMN memory_file TEXT NOT NULL DEFAULT '';
ALTER TABLE displaced ADD COLUMN suspended INTEGER NOT NULL DEFAULT 0;
CREATE TABLE displaced_memory (
  operation_id TEXT NOT NULL REFERENCES displaced (operation_id),
  position     INTEGER NOT NULL,
  layer_id     TEXT NOT NULL REFERENCES layers (id),
  PRIMARY KEY (operation_id, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX displaced_memory_layer ON displaced_memory (layer_id);

-- The full checkpoint of an image's first boot, for each shape of machine.
CREATE TABLE image_boots (
  build_id      TEXT NOT NULL REFERENCES images (build_id),
  shape         TEXT NOT NULL,
  checkpoint_id TEXT NOT NULL UNIQUE REFERENCES checkpoints (id),
  PRIMARY KEY (build_id, shape)
) STRICT, WITHOUT ROWID;

-- How many standbys of a checkpoint are to be ready, and those that are: runs
-- that are loaded, have never run, and write layer_id when they do.
CREATE TABLE pools (
  checkpoint_id TEXT PRIMARY KEY REFERENCES checkpoints (id),
  count         INTEGER NOT NULL CHECK (count > 0)
) STRICT, WITHOUT ROWID;
CREATE TABLE standbys (
  run_id        TEXT PRIMARY KEY,
  checkpoint_id TEXT NOT NULL REFERENCES checkpoints (id),
  layer_id      TEXT NOT NULL UNIQUE REFERENCES layers (id),
  created_at    INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX standbys_checkpoint ON standbys (checkpoint_id);
