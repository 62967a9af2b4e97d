"""What processes of a job learn from outside: their environment variables, and what their submission tells them."""
