"""Where a run's checkpoints lie: in a folder, or as objects in a store; and how one is committed there."""
