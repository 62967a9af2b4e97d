"""The version of slurmtrain, for every room that names it."""

__version__ = "0.1.0"
