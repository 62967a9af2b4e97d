"""Runs on mixed hardware: shares of batches that suit the speeds of ranks."""
