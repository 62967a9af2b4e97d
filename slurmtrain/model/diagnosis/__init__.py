"""What went wrong, which ranks are to blame, and where the time went."""
