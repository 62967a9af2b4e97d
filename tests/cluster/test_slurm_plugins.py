"""Options that a plug-in of the site adds to sbatch: they are options like any other."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cluster import REPOSITORY, Cluster, ClusterSite

SOURCE = REPOSITORY / "tests" / "helpers" / "zz_note.c"


@pytest.fixture
def plugin(cluster: Cluster) -> Iterator[Path]:
    """A real SPANK plug-in that adds --container-image and --zz-note; yields the file that makes Slurm load it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the plug-in")
    version = cluster.slurm("scontrol", "--version").split()[-1]
    year, month, micro = (int(part) for part in version.split(".")[:3])
    plugstack = Path(cluster.conf).with_name("plugstack.conf")
    with tempfile.TemporaryDirectory(prefix="plugin-", dir=plugstack.parent) as folder:
        Path(folder).chmod(0o755)
        library = Path(folder, "zz_note.so")
        number = f"-DSLURM_VERSION_NUMBER={year << 16 | month << 8 | micro}"
        subprocess.run([compiler, "-shared", "-fPIC", number, "-o", str(library), str(SOURCE)], check=True)
        plugstack.write_text(f"required {library}\n")
        try:
            yield plugstack
        finally:
            plugstack.unlink(missing_ok=True)


def test_an_option_of_a_plug_in_is_an_option_like_any_other(site: ClusterSite, plugin: Path) -> None:
    command = "sh -c 'echo note:$ZZ_NOTE image:$ZZ_IMAGE'"
    spec = site.commanding(command, slurm={"partition": "spot", "zz_note": "hello there", "container-image": "a#b:1"})
    rendered = site.call("render", str(spec)).stdout
    assert "#SBATCH --zz-note='hello there'\n" in rendered
    assert "#SBATCH --container-image='a#b:1'\n" in rendered
    run_id = site.submit(spec, "--wait")
    assert site.printed(run_id) == ["note:hello there image:a#b:1"]
    # As it is typed, for srun alone.
    spec = site.commanding(command, slurm={"partition": "spot", "srun": ["--zz-note=typed"]})
    assert site.printed(site.submit(spec, "--wait")) == ["note:typed image:"]
    # srun would tell of a slip only in the job.
    spec = site.commanding(command, slurm={"partition": "spot", "srun": ["--zz-not=typed", "--mpi=none"]})
    warnings = [line for line in site.call("render", str(spec)).stderr.splitlines() if "option" in line]
    assert warnings == ["warning: srun has no option --zz-not here; did you mean 'zz-note'?"]
    # A slip gets the nearest of the site's own options, at its line.
    spec = site.commanding(command, slurm={"partition": "spot", "zz_not": "x"})
    refused = site.call("submit", str(spec), "--executor", "slurm", code=2)
    assert "slurm.zz_not: this site's sbatch has no option --zz-not; did you mean 'zz-note'?" in refused.stderr
    spec = site.commanding(command, slurm={"partition": "spot", "array": "1-3"})
    refused = site.call("submit", str(spec), "--executor", "slurm", code=2)
    assert "slurm.array: --array is not passed on: use 'sweep'" in refused.stderr
    # Once the plug-in is gone, sbatch itself refuses what it was remembered to have had.
    plugin.unlink()
    spec = site.commanding(command, slurm={"partition": "spot", "zz_note": "x"})
    refused = site.call("submit", str(spec), "--executor", "slurm", code=2)
    assert "zz-note" in refused.stderr
