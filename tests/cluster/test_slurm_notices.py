"""A job on a real cluster tells people what becomes of its run, without any watch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, events, preempt
from helpers.site import until
from helpers.webhooks import webhook


def test_a_preempted_job_tells_its_story_once_and_its_requeue_waits_for_nobody(
    site: ClusterSite, cluster: Cluster
) -> None:
    with webhook(cluster.controller_address) as hook:
        config = site.path / "slurmtrain.yaml"
        states = ["started", "preempted", "completed"]
        config.write_text(json.dumps({"notify": {"hook": {"to": hook.url, "states": states}}}))
        config.chmod(0o600)
        os.chown(config, site.person.uid, site.person.gid)
        spec = site.commanding("bash -c '[ {attempt} = 2 ] || sleep 600'", slurm=SPOT)
        run_id = site.submit(spec, "--executor", "slurm")
        until(lambda: hook.kinds == ["started"], "the message about the start")
        preempt(cluster, lambda: events(site, run_id, "requeue"))
        # Only looks: no command tells anybody.
        run = site.until_state(run_id, "completed", patience_s=240)
        until(lambda: len(hook.kinds) == 3, f"the other messages: {hook.kinds}")
        assert hook.kinds == ["started", "preempted", "completed"]
        assert [message["number"] for message in hook.messages] == [0, 1, 0]
        assert {message["run"] for message in hook.messages} == {run_id}
        assert hook.messages[-1]["state"] == "completed"
        site.call("sync")
        assert len(hook.requests) == 3
        # Neither plans, journals nor logs have the URL.
        files = [path for path in Path(run["dir"]).rglob("*") if path.is_file() and not path.is_symlink()]
        assert files
        assert not any(b"secret-token" in path.read_bytes() for path in files)
