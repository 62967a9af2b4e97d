"""Turn a YAML file and overrides into Plans; all mistakes are found at once, each with its file and line."""

from slurmtrain.specfile.compose import write_assignments
from slurmtrain.specfile.load import PlannedRun, SiteRules, SpecFile, load_spec, replan
from slurmtrain.specfile.overrides import ValueSource

__all__ = ["PlannedRun", "SiteRules", "SpecFile", "ValueSource", "load_spec", "replan", "write_assignments"]
