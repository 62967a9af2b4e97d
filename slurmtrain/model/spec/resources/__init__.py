"""The section `resources` of a spec, and how the ranks of a run are placed on these resources."""
