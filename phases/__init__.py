"""phasegate: takes a GPU kernel from source to production LLM serving, one gated phase at a time."""

__version__ = "0.2.0"
