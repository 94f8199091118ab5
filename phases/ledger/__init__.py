"""Git checkpoints by plumbing (DESIGN §7)."""
