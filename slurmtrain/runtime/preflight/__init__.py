"""Before training: nodes meet, prove their networks, are measured, and hear whether they may train."""
