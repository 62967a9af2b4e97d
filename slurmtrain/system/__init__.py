"""Effects that all layers above need: files that survive a kill, journals, processes by identity."""
