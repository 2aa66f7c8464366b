-- Version 5. The machines that a person has stopped: none of them is started by
-- itself.

CREATE TABLE at_rest (
  machine_id TEXT PRIMARY KEY REFERENCES machines (id) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
