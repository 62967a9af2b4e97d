"""The verbs: what each command does, without a word about how it is shown."""
