"""Nouns and pure decisions: the standard library only, no files, no processes, no clocks."""
