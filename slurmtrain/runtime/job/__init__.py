"""What every process in a job needs: its environment, signals, lease, heartbeats, and the run's files."""
