"""Turn a YAML file and overrides into Plans; all mistakes are found at once, each with its file and line."""

from slurmtrain.specfile.from_data import write_assignments
from slurmtrain.specfile.load import PlannedRun, SpecFile, load_spec, replan

__all__ = ["PlannedRun", "SpecFile", "load_spec", "replan", "write_assignments"]
