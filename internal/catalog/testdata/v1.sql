-- A catalog as the first release wrote it. Never change this file.
PRAGMA foreign_keys = OFF;
BEGIN TRANSACTION;
CREATE TABLE chains (
  machine_id TEXT NOT NULL REFERENCES machines (id),
  position   INTEGER NOT NULL,
  layer_id   TEXT NOT NULL REFERENCES layers (id),
  PRIMARY KEY (machine_id, position),
  UNIQUE (machine_id, layer_id)
) STRICT, WITHOUT ROWID;
INSERT INTO "chains" VALUES('000000000000a001',0,'000000000000a001-0');
INSERT INTO "chains" VALUES('000000000000a001',1,'000000000000a001-above-0000000000000c01');
CREATE TABLE checkpoint_layers (
  checkpoint_id TEXT NOT NULL REFERENCES checkpoints (id),
  position      INTEGER NOT NULL,
  layer_id      TEXT NOT NULL REFERENCES layers (id),
  PRIMARY KEY (checkpoint_id, position)
) STRICT, WITHOUT ROWID;
INSERT INTO "checkpoint_layers" VALUES('0000000000000c01',0,'000000000000a001-0');
CREATE TABLE checkpoint_routes (
  checkpoint_id TEXT NOT NULL REFERENCES checkpoints (id),
  host          TEXT NOT NULL,
  port          INTEGER NOT NULL,
  listening     INTEGER NOT NULL,
  PRIMARY KEY (checkpoint_id, host)
) STRICT, WITHOUT ROWID;
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
INSERT INTO "checkpoints" VALUES(1,'0000000000000c01','000000000000a001','before-agent','disk','stopped',NULL,'before the agent',0,'{"memory_bytes":536870912,"cpus":1,"disk_bytes":2147483648,"network":"none"}','build1',4096,'s','p','c','bash',7,1767323045000000007);
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
CREATE TABLE displaced_routes (
  operation_id TEXT NOT NULL REFERENCES displaced (operation_id),
  host         TEXT NOT NULL,
  port         INTEGER NOT NULL,
  created_at   INTEGER NOT NULL,
  PRIMARY KEY (operation_id, host)
) STRICT, WITHOUT ROWID;
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
INSERT INTO "images" VALUES('build1','debian','x86_64','6.1',2147483648,268435456,'["nginx","python3"]','Debian 12',1767323045000000002);
CREATE TABLE last_used (
  kind        TEXT NOT NULL CHECK (kind IN ('machine', 'checkpoint')),
  scope       TEXT NOT NULL,
  resource_id TEXT NOT NULL,
  PRIMARY KEY (kind, scope)
) STRICT, WITHOUT ROWID;
INSERT INTO "last_used" VALUES('checkpoint','','0000000000000c01');
INSERT INTO "last_used" VALUES('checkpoint','000000000000a001','0000000000000c01');
INSERT INTO "last_used" VALUES('machine','','000000000000a001');
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
INSERT INTO "layers" VALUES('000000000000a001-0','000000000000a001','layers/000000000000a001-0.qcow2','qcow2',1073741824,0,'sealed',NULL,1767323045000000003);
INSERT INTO "layers" VALUES('000000000000a001-above-0000000000000c01','000000000000a001','layers/000000000000a001-above-0000000000000c01.qcow2','qcow2',1073741824,0,'created',NULL,1767323045000000005);
CREATE TABLE leases (
  kind         TEXT NOT NULL CHECK (kind IN ('machine', 'checkpoint', 'layer', 'image')),
  resource_id  TEXT NOT NULL,
  operation_id TEXT NOT NULL REFERENCES operations (id),
  exclusive    INTEGER NOT NULL,
  expires_at   INTEGER NOT NULL,
  PRIMARY KEY (kind, resource_id, operation_id)
) STRICT, WITHOUT ROWID;
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
INSERT INTO "machines" VALUES('000000000000a001','web','build1','{"memory_bytes":536870912,"cpus":2,"disk_bytes":2147483648,"on_boot":"nginx","tmpfs":["/tmp"],"network":"none"}','creating',0,'','','abababababababababababababababab','0000000000000c01',1767323045000000003);
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
INSERT INTO "operations" VALUES(1,'000000000000e001','request-000000000000e001','checkpoint create','{}','475ab22b633e629587fb35e0229124d47a6ea2373eefd070a375ddee7ea740d6','','','','running','{}','','','{}',1767323045000000008,0);
CREATE TABLE routes (
  host       TEXT PRIMARY KEY,
  machine_id TEXT NOT NULL REFERENCES machines (id),
  port       INTEGER NOT NULL,
  created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX machines_image ON machines (image_build_id);
CREATE INDEX machines_head ON machines (head_checkpoint);
CREATE INDEX chains_layer ON chains (layer_id);
CREATE INDEX checkpoints_parent ON checkpoints (parent);
CREATE INDEX checkpoints_image ON checkpoints (image_build_id);
CREATE INDEX checkpoint_layers_layer ON checkpoint_layers (layer_id);
CREATE INDEX routes_machine ON routes (machine_id);
CREATE INDEX operations_ended ON operations (seq) WHERE state <> 'running';
CREATE INDEX operations_running ON operations (seq) WHERE state = 'running';
CREATE INDEX operations_machine ON operations (machine_id);
CREATE INDEX leases_operation ON leases (operation_id);
CREATE INDEX displaced_layers_layer ON displaced_layers (layer_id);
COMMIT;
PRAGMA application_id = 1752132708;
PRAGMA user_version = 1;
