-- What went wrong with a guest's hooks, where a frozen checkpoint was allowed to
-- be made all the same.
ALTER TABLE checkpoints ADD COLUMN hook_failure TEXT NOT NULL DEFAULT '';
