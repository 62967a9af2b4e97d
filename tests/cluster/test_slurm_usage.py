"""What a job used, as its own node has measured it, against what it asked Slurm for."""

from __future__ import annotations

from helpers.cluster import ClusterSite
from helpers.cluster_runs import SPOT
from helpers.rare import rare
from helpers.site import ONE_PROCESS

# Holds 400 MiB and computes on one core, for long enough that its agent looks five times.
SCRIPT = """
import time
held = bytearray(b"x") * (400 << 20)
until = time.time() + 72
while time.time() < until:
    pass
"""


@rare
def test_the_request_that_would_have_sufficed_is_what_the_job_has_needed(site: ClusterSite) -> None:
    (site.path / "hold.py").write_text(SCRIPT)
    request = {**ONE_PROCESS, "cpus_per_proc": 2, "mem": "1500MB"}
    run_id = site.submit(site.commanding("python hold.py", "hold", resources=request, slurm=SPOT))
    site.until_state(run_id, "completed", patience_s=300)
    run = site.show(run_id)
    memory, cpus, gpus, time = run["usage"]
    assert memory["asked"] == 1500 << 20
    # The agent and its submission need some, too.
    assert 420e6 < memory["used"] < 900e6
    assert memory["suffices"] >= 1.2 * memory["used"]
    assert memory["request"] in ("mem: 640MB", "mem: 768MB", "mem: 896MB", "mem: 1GB"), memory
    assert cpus["asked"] == 2
    # Processors of this machine are shared with other tests.
    assert 0.05 < cpus["used"] < 1.2
    assert cpus["request"] == "cpus_per_proc: 1"
    assert (gpus["asked"], gpus["used"]) == (0, None)
    assert (time["asked"], time["request"]) == (600, 'time: "00:10:00"')
    assert time["used"] >= 72
    assert f"memory      {memory['why']}" in site.call("show", run_id).stdout.replace("\n            ", " ")
    row = site.call("status", run_id, "--columns", "name,usage.memory,usage.cpus.request").stdout.splitlines()[-1]
    assert row.startswith("hold")
    assert "of 1.5 GiB" in row
