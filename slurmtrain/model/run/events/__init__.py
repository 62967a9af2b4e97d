"""The events of journals, one frozen dataclass for each kind; ``docs/events.md`` is generated from them."""
