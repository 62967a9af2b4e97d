"""What most users never need, found through entry points: the rest of the package imports nothing from here."""
