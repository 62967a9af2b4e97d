"""What a registry on a PostgreSQL server needs: its schema there, and connections that wait for each other."""
