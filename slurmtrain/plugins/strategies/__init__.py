"""Strategies beyond whole replicas, and communication hooks of these."""
