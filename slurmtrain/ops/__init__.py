"""The verbs: what each command does. The command line decides how it is shown."""
