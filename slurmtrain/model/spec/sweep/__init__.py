"""Sweeps: the contents of a section `sweep`, which runs follow from it, and how much they may cost."""
