"""Callbacks and helpers for trainers that people already have: the only place that knows these libraries.

Each module needs the library that it is named for, and none of them is imported by the rest of slurmtrain.
"""
