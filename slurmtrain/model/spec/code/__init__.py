"""What the section `code` of a spec consists of, and where a run finds its code."""
