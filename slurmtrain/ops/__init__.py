"""The verbs: what each command does; how it is shown is up to the command line."""
