"""Reading the metrics of a script from what it prints or writes."""
