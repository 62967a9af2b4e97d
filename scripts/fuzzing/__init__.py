"""The fuzz driver of scripts/fuzz."""
