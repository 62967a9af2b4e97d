"""Telling people what becomes of their runs: ``notify`` in the configuration, from ``watch``, ``sync`` and jobs."""
