-- Version 4. A disk checkpoint can fail verification, too: what is known is the
-- checkpoint's now. Of its columns only these and parent change.

ALTER TABLE checkpoints ADD COLUMN verification TEXT NOT NULL DEFAULT 'unverified' CHECK (verification IN ('unverified', 'verified', 'failed'));
ALTER TABLE checkpoints ADD COLUMN problem TEXT NOT NULL DEFAULT '';
UPDATE checkpoints SET (verification, problem) = (SELECT verification, problem FROM checkpoint_full WHERE checkpoint_id = id)
  WHERE id IN (SELECT checkpoint_id FROM checkpoint_full);
ALTER TABLE checkpoint_full DROP COLUMN verification;
ALTER TABLE checkpoint_full DROP COLUMN problem;
