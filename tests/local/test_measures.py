"""How fast a real run was: what ranks waited for is known, and all commands say the same of it."""

from __future__ import annotations

import json
import socket

import pytest
from helpers.site import Site

import slurmtrain

STEPS, LATE_S = 60, 0.03


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_waits_for_data_and_for_a_late_rank_are_measured_and_everybody_says_the_same(
    site: Site, tmp_path_factory: pytest.TempPathFactory, strategy: str
) -> None:
    folder = tmp_path_factory.mktemp("truth")
    run_id = site.submit(
        site.spec(
            command=f"python {site.scripts / 'measured.py'} {folder}",
            params={"steps": STEPS, "sample_s": 0.005, "late_s": LATE_S},
            strategy=strategy,
            measures={"communication": True, "peak_tflops": 0.001},
        )
    )
    site.until_state(run_id, "completed")
    measures = site.show(run_id)["measures"]
    first, last = measures["ranks"]
    for rank in (first, last):
        truth = json.loads((folder / f"{rank['rank']}.json").read_text())
        # Collating, and the profiler, are in one of both only.
        assert rank["data_wait_share"] == pytest.approx(truth, abs=0.1)
        assert rank["step_p95_s"] >= rank["step_p50_s"] > LATE_S + 4 * 0.005
        assert rank["node"].startswith(socket.gethostname())
    waited = LATE_S / first["step_p50_s"]
    assert 0.6 * waited < first["communication_share"] < waited + 0.3
    assert last["communication_share"] < first["communication_share"] - 0.3 * waited
    assert measures["communication_share"] == pytest.approx(
        (first["communication_share"] + last["communication_share"]) / 2
    )
    # With shards the forward pass waits for other ranks too, so that no part of it is a rank's own.
    assert measures["slow_ranks"] == ([] if strategy == "fsdp" else [1])
    assert measures["steps_per_second"] == pytest.approx(1 / first["step_p50_s"], rel=0.3)
    assert measures["samples_per_second"] == pytest.approx(8 * measures["steps_per_second"])
    assert measures["tokens_per_second"] == pytest.approx(16 * measures["samples_per_second"])
    assert measures["mfu"] == pytest.approx(measures["samples_per_second"] * 1e6 / 2e9)

    [compared] = site.json("compare", run_id, "--performance")["runs"]
    named_alike = compared.keys() & measures.keys()
    assert {"steps_per_second", "data_wait_share", "communication_share", "mfu", "energy_kwh"} <= named_alike
    assert {name: compared[name] for name in named_alike} == {name: measures[name] for name in named_alike}
    assert compared["memory_bytes"] == measures["peak_memory_bytes"]
    assert slurmtrain.Registry(site.runs).run(run_id).measures == measures
    shown = site.call("show", run_id).stdout
    assert f"step {1000 * measures['step_p50_s']:.3g} ms" in shown
    assert ("rank 1 on" in shown) == (strategy != "fsdp")
