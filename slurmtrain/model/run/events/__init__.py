"""The events of journals, one frozen dataclass for each kind; docs/reference/events.md is generated from them."""
