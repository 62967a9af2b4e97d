"""``slurmtrain top``: a live page of all runs. textual is imported only once a terminal is known to be there."""
