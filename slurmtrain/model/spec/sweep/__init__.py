"""Sweeps: what a section `sweep` may say, which runs follow from it, and what they may cost."""
