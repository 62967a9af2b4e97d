"""The registry in Python: runs as objects, for notebooks and for programs that submit and wait."""
