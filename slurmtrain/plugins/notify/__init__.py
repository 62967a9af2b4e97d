"""Messages about runs, which jobs, ``watch`` and ``sync`` send to the receivers in the configuration (``notify``)."""
