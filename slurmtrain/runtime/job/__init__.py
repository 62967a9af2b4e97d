"""What every process in a job needs: its signals, lease, heartbeats, and the run's files."""
