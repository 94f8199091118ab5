"""Git checkpoints by plumbing."""
