"""What a registry in a SQLite file needs: the file, its locks, and connections that wait for them."""
