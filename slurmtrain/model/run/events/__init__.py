"""The events of journals, one frozen dataclass a kind; ``docs/events.md`` is generated from them."""
