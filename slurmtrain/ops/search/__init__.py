"""Searches: sweeps whose runs are chosen one after the other, by what the runs before them have reached."""
