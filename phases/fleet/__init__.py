"""Moving production: arms, guarded switches, bakes, waves, rollback, watch. Shared by Phases 3 and 4."""
