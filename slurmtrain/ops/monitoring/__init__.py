"""The state of all runs for Prometheus."""
