"""The registry: a projection of all run directories into one SQLite file, which can be deleted and rebuilt."""
