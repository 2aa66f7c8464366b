-- Version 2.

-- What happened outside a machine's disk: no restore undoes it, so a restore
-- lists what came since its checkpoint. The newest 1,000 of a machine are kept.
CREATE TABLE effects (
  seq        INTEGER PRIMARY KEY AUTOINCREMENT,
  machine_id TEXT NOT NULL REFERENCES machines (id),
  kind       TEXT NOT NULL CHECK (kind IN ('published', 'withdrawn', 'copied-out')),
  what       TEXT NOT NULL, -- a host name and port, or a path in the guest
  at         INTEGER NOT NULL
) STRICT;
CREATE INDEX effects_machine ON effects (machine_id, seq);
