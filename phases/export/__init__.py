"""Exchange with flashinfer-bench: its JSON for a kernel and its results, and its Solutions as candidates of ours."""
