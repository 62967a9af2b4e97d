"""Effects that every layer above needs: files that survive a kill, journals, processes by identity."""
