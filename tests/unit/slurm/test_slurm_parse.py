"""Reading squeue, sacct and scontrol: what a real cluster printed, odd names, no lines of theirs, reasons to wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.slurm.parse import (
    ACCOUNTING_FIELDS,
    QUEUE_FIELDS,
    Job,
    NodeInfo,
    count_of,
    read_accounting,
    read_duration,
    read_job,
    read_nodes,
    read_partitions,
    read_queue,
)

# --- squeue -----------------------------------------------------------------------------------------------------


def queue_line(*cells: str) -> str:
    """A line as squeue prints it: cells cut and padded to their widths."""
    return "".join(f"{cell[:width]:<{width}}" for cell, (_, width) in zip(cells, QUEUE_FIELDS, strict=True))


# Lines of Slurm 22.05.8, without the blanks between the cells.
RUNNING = ("9", "RUNNING", "None", "0", "1795260968", "1795262768", "30:00", "0", "4294901753", "node[0-2]",
           "digits-r1")  # fmt: skip
PENDING = ("10", "PENDING", "BeginTime", "1", "1795260980", "1795262780", "30:00", "0", "4294901752", "", "requeued")
HELD = ("6", "PENDING", "JobHeldUser", "0", "N/A", "N/A", "1-02:03:00", "0", "0", "", "held")
FAILED = ("7", "FAILED", "NonZeroExitCode", "0", "1795260968", "1795260969", "30:00", "768", "4294901755", "node0", "x")
CANCELLED = ("11", "CANCELLED", "None", "0", "1795260973", "1795260974", "30:00", "15", "4294901751", "node0", "y")


def test_a_requeued_job_has_its_restarts_and_the_time_at_which_it_may_start() -> None:
    job = read_queue(queue_line(*PENDING))["10"]
    assert (job.state, job.reason, job.restart, job.starts_at, job.nodes) == (
        "PENDING", "BeginTime", 1, 1795260980.0, "",
    )  # fmt: skip
    held = read_queue(queue_line(*HELD))["6"]
    assert (held.starts_at, held.ends_at, held.priority, held.time_limit_s) == (None, None, 0, 93780.0)


@pytest.mark.parametrize(
    ("text", "code", "signal"),
    [("768", 3, None), ("15", 0, 15), ("3:0", 3, None), ("0:9", 0, 9), ("1:15", 1, 15), ("N/A", None, None),
     ("", None, None)],
)  # fmt: skip
def test_squeue_prints_the_status_of_wait_or_code_and_signal(text: str, code: int | None, signal: int | None) -> None:
    [job] = read_queue(queue_line(*FAILED[:7], text, *FAILED[8:])).values()
    assert (job.exit_code, job.signal) == (code, signal)


@pytest.mark.parametrize(
    "name",
    ["a|b", "作業 🐍", "a\u2028b", "x" * 300, "", "new\nline"],
)
def test_the_name_of_a_job_of_squeue_may_hold_anything(name: str) -> None:
    jobs = read_queue(queue_line(*RUNNING[:-1], name) + "\n" + queue_line(*PENDING) + "\n")
    assert [job.name for job in jobs.values()] == [name, "requeued"]
    assert read_queue(queue_line(*RUNNING[:-1], name + "x" * 400))["9"].name == (name + "x" * 400)[:300]


@pytest.mark.parametrize(
    ("job_id", "is_job"),
    [("9", True), ("9_3", True), ("9_[0-3,7%2]", True), ("9_[0-3,...", True), ("9+0", True), ("", False), ("9x", False),
     ("-9", False), ("9_", False), ("9.batch", False), ("9+", False)],
)  # fmt: skip
def test_a_row_of_squeue_has_the_id_of_a_job_an_element_or_several(job_id: str, is_job: bool) -> None:
    assert bool(read_queue(queue_line(job_id, *RUNNING[1:]))) is is_job
    assert read_queue(f"\n{job_id}\n{job_id:<40}RUNNING") == {}


def test_the_name_of_a_job_of_squeue_is_no_row_of_another_job() -> None:
    forged = f"x\n{queue_line(*FAILED)}"[:300]
    assert read_queue(f"{queue_line(*RUNNING[:-1], forged)}\n{queue_line(*PENDING)}").keys() == {"9", "10"}


@given(st.text() | st.text(st.sampled_from("|.:-019 \nABCDEFINOTU_=")))
def test_no_text_of_slurms_commands_is_an_error(text: str) -> None:
    assert all(job_id == job.id and job.state for job_id, job in read_queue(text).items())
    assert all(rows and {row.id for row in rows} == {job_id} for job_id, rows in read_accounting(text).items())
    assert all(fields["PartitionName"] == name for name, fields in read_partitions(text).items())
    assert all(node.name in text and node.partition in text for node in read_nodes(text))
    assert all(key in text and value in text for key, value in read_job(text).items())
    read = read_duration(text)
    assert read is None or isinstance(read, float)


def test_a_heterogeneous_job_is_one_job_in_the_state_of_its_leader_on_the_nodes_of_all_components() -> None:
    # In this order, as squeue of 22.05.8 lists them.
    lines = [
        queue_line("3+1", *RUNNING[1:9], "node[0-1]", RUNNING[10]),
        queue_line("3+0", "COMPLETING", *RUNNING[2:9], "node2", RUNNING[10]),
        queue_line(*PENDING),
    ]
    jobs = read_queue("\n".join(lines))
    assert {job.id: (job.state, job.nodes) for job in jobs.values()} == {
        "3": ("COMPLETING", "node2,node[0-1]"),
        "10": ("PENDING", ""),
    }
    assert list(jobs) == [job.id for job in jobs.values()]


# --- sacct ------------------------------------------------------------------------------------------------------

# sacct --parsable2 --noheader --duplicates of Slurm 22.05.8, seconds since 1970.
ACCOUNTING = """\
8|FAILED|0:9|1795260967|1795260968|1795260968|30|node0|killed
8.batch|CANCELLED|0:9|1795260968|1795260968|1795260968||node0|batch
10|REQUEUED|0:0|1795260967|1795260968|1795260974|30|node0|requeued
10.batch|FAILED|15:0|1795260968|1795260968|1795260974||node0|batch
11|CANCELLED by 1001|0:0|1795260972|1795260973|1795260974|30|node0|cancelled
11.batch|CANCELLED|0:15|1795260973|1795260973|1795260974||node0|batch
10|RUNNING|0:0|1795260974|1795260980|Unknown|30|node1|requeued
10.batch|RUNNING|0:0|1795260980|1795260980|Unknown||node1|batch
5_[1-3%2]|PENDING|0:0|1795260967|Unknown|Unknown|1563|None assigned|arr
12_3|TIMEOUT|0:0|1795260967|1795260970|1795262770|30|node[0-1]|of an array
"""


def test_all_starts_of_each_job_are_read_from_sacct() -> None:
    starts = read_accounting(ACCOUNTING)
    assert {job_id: [job.state for job in jobs] for job_id, jobs in starts.items()} == {
        "8": ["FAILED"], "10": ["REQUEUED", "RUNNING"], "11": ["CANCELLED by 1001"], "5": ["PENDING"],
        "12_3": ["TIMEOUT"],
    }  # fmt: skip
    assert starts["12_3"][0] == Job(
        id="12_3", name="of an array", state="TIMEOUT", submitted_at=1795260967.0, starts_at=1795260970.0,
        ends_at=1795262770.0, time_limit_s=1800.0, exit_code=0, nodes="node[0-1]",
    )  # fmt: skip
    assert (starts["8"][0].exit_code, starts["8"][0].signal) == (0, 9)
    assert (starts["10"][1].ends_at, starts["10"][1].nodes, starts["5"][0].nodes) == (None, "node1", "")


def row(job_id: str, state: str, start: str = "10", name: str = "n") -> str:
    return f"{job_id}|{state}|0:0|5|{start}|20|30|node0|{name}\n"


@pytest.mark.parametrize(
    ("written", "elements"),
    [
        ("[1-3]", {1, 2, 3}),
        ("[1,4,7%2]", {1, 4, 7}),
        ("[0-1,4-7%20]", {0, 1, 4, 5, 6, 7}),
        ("[0-8:4%2]", {0, 4, 8}),
        ("[5]", {5}),
        ("[]", set()),
        ("[x-3,2-1,-1]", set()),
    ],
)
def test_a_row_for_several_elements_of_an_array_is_about_no_others(written: str, elements: set[int]) -> None:
    [job] = read_accounting(row(f"5_{written}", "CANCELLED by 1001"))["5"]
    assert {index for index in range(20) if job.has_element(index)} == elements


def test_starts_are_in_the_order_in_which_they_began_and_one_that_never_began_is_last() -> None:
    text = row("7", "CANCELLED by 0", "None") + row("7", "NODE_FAIL", "300") + row("7", "PREEMPTED", "200")
    assert [job.state for job in read_accounting(text)["7"]] == ["PREEMPTED", "NODE_FAIL", "CANCELLED by 0"]


@pytest.mark.parametrize(
    ("state", "of_job"),
    [("FAILED", "OUT_OF_MEMORY"), ("COMPLETED", "OUT_OF_MEMORY"), ("NODE_FAIL", None), ("PREEMPTED", None),
     ("RUNNING", None), ("TIMEOUT", None), ("CANCELLED by 1001", None)],
)  # fmt: skip
def test_a_step_without_memory_explains_a_failure_but_not_what_slurm_or_a_person_did_to_the_job(
    state: str, of_job: str | None
) -> None:
    text = row("7", state) + row("7.batch", "FAILED") + row("7.0", "OUT_OF_MEMORY")
    assert [job.state for job in read_accounting(text)["7"]] == [of_job or state]


def test_a_step_belongs_to_the_start_that_stands_before_it() -> None:
    text = row("7", "FAILED", "10") + row("7.0", "OUT_OF_MEMORY") + row("7", "FAILED", "40") + row("7.0", "FAILED")
    assert [job.state for job in read_accounting(text)["7"]] == ["OUT_OF_MEMORY", "FAILED"]


def test_the_starts_of_a_heterogeneous_job_are_those_of_its_leader_also_if_a_step_elsewhere_had_no_memory() -> None:
    text = row("3+0", "REQUEUED") + row("3+1", "REQUEUED") + row("3+0", "FAILED", "15")
    text += row("3+1", "FAILED", "15").replace("node0", "node1") + row("3+1.0", "OUT_OF_MEMORY", "15")
    [starts] = read_accounting(text).values()
    assert [(start.id, start.state, start.nodes) for start in starts] == [
        ("3", "REQUEUED", "node0,node0"),
        ("3", "OUT_OF_MEMORY", "node0,node1"),
    ]


def test_short_lines_of_sacct_and_steps_without_their_job_are_passed_over() -> None:
    short = "\n7|FAILED\nsacct: error: x\n|||\n"
    assert read_accounting(short + row("7.batch", "OUT_OF_MEMORY") + row("8", "FAILED")).keys() == {"8"}


# --- round trips ------------------------------------------------------------------------------------------------

ids = st.from_regex(r"[1-9][0-9]{0,8}(_[0-9]{1,4})?", fullmatch=True)
states = st.sampled_from(
    ["PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED by 1001", "OUT_OF_MEMORY", "NODE_FAIL", "SOMETHING_NEW"]
)
times = st.none() | st.integers(1, 2**33).map(float)
node_lists = st.sampled_from(["", "node0", "node[0-3,7]", "gpu-a[001-128],login"])
# Whatever a name may hold but a line break, and blanks at its ends, which squeue pads with.
names = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=300).map(str.strip)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    signal = draw(st.none() | st.integers(1, 64))
    return Job(
        id=draw(ids),
        name=draw(names),
        state=draw(states),
        starts_at=draw(times),
        ends_at=draw(times),
        time_limit_s=draw(st.none() | st.integers(0, 40 * 24 * 60).map(lambda minutes: minutes * 60.0)),
        exit_code=draw(st.integers(0, 255)),
        signal=signal,
        nodes=draw(node_lists),
    )


def time_of(at: float | None, nothing: str) -> str:
    return nothing if at is None else f"{at:.0f}"


@st.composite
def queued(draw: st.DrawFn) -> Job:
    return replace(
        draw(jobs()),
        reason=draw(st.sampled_from(["", "Priority", "Resources", "ReqNodeNotAvail, UnavailableNodes:node3"])),
        restart=draw(st.integers(0, 99)),
        priority=draw(st.none() | st.integers(0, 2**32)),
    )


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "UNLIMITED"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}" if days else f"{hours}:{minutes:02}:{rest:02}"


def in_queue(job: Job) -> str:
    return queue_line(
        job.id, job.state, job.reason or "None", str(job.restart), time_of(job.starts_at, "N/A"),
        time_of(job.ends_at, "N/A"), duration(job.time_limit_s), str((job.exit_code or 0) << 8 | (job.signal or 0)),
        "N/A" if job.priority is None else str(job.priority), job.nodes, job.name,
    )  # fmt: skip


def in_accounting(job: Job) -> str:
    minutes = "UNLIMITED" if job.time_limit_s is None else f"{job.time_limit_s / 60:.0f}"
    times = (time_of(at, "Unknown") for at in (job.submitted_at, job.starts_at, job.ends_at))
    cells = (job.id, job.state, f"{job.exit_code}:{job.signal or 0}", *times, minutes, job.nodes or "None assigned")
    assert len(cells) + 1 == len(ACCOUNTING_FIELDS)
    return "|".join((*cells, job.name))


@given(st.lists(queued(), unique_by=lambda job: job.id, max_size=4))
def test_what_squeue_prints_is_read_back(written: list[Job]) -> None:
    read = read_queue("".join(in_queue(job) + "\n" for job in written))
    assert read == {job.id: job for job in written}


@given(st.lists(jobs().flatmap(lambda job: times.map(lambda at: replace(job, submitted_at=at))), max_size=4))
def test_what_sacct_prints_is_read_back(written: list[Job]) -> None:
    read = read_accounting("".join(in_accounting(job) + "\n" for job in written))
    assert read.keys() == {job.id for job in written}
    for job_id, starts in read.items():
        began = [job.starts_at if job.starts_at is not None else float("inf") for job in starts]
        assert began == sorted(began)
        assert sorted(map(repr, starts)) == sorted(repr(job) for job in written if job.id == job_id)


# --- scontrol and small values ----------------------------------------------------------------------------------

PARTITIONS = """\
PartitionName=spot AllowGroups=ALL Default=YES QoS=N/A DefaultTime=00:30:00 MaxNodes=UNLIMITED MaxTime=04:00:00 \
Nodes=node[0-3] PreemptMode=REQUEUE State=UP TotalCPUs=32 TotalNodes=4 JobDefaults=(null) \
TRES=cpu=32,mem=62.50G,node=4,billing=32,gres/gpu=8
PartitionName=ondemand Default=NO MaxTime=UNLIMITED TRES=cpu=32
"""


def test_partitions_are_read_with_their_fields() -> None:
    partitions = read_partitions(PARTITIONS)
    assert list(partitions) == ["spot", "ondemand"]
    assert partitions["spot"]["MaxTime"] == "04:00:00"
    assert partitions["spot"]["TRES"] == "cpu=32,mem=62.50G,node=4,billing=32,gres/gpu=8"
    assert partitions["ondemand"] == {
        "PartitionName": "ondemand", "Default": "NO", "MaxTime": "UNLIMITED", "TRES": "cpu=32",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300.0), ("5:30", 330.0), ("04:00:00", 14400.0), ("1-02:03:00", 93780.0), ("1-02:03", 93780.0),
     ("2-0", 172800.0), ("0:00", 0.0), ("UNLIMITED", None), ("NONE", None), ("INVALID", None), ("", None),
     ("1-", None), ("-5", None), ("1:2:3:4", None), ("4 h", None)],
)  # fmt: skip
def test_a_duration_is_read_as_slurm_writes_it(text: str, seconds: float | None) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize(
    ("name", "count"), [("cpu", 32), ("gres/gpu", 8), ("gres/gpu:a100", 4), ("mem", None), ("gres", None), ("", None)]
)
def test_a_resource_is_counted_by_its_whole_name(name: str, count: int | None) -> None:
    assert count_of("cpu=32,mem=62.50G,gres/gpu=8,gres/gpu:a100=4", name) == count


# --- sinfo --------------------------------------------------------------------------------------------------------


def test_nodes_are_read_once_for_each_partition() -> None:
    text = "node0|spot|idle|8|16000|gpu:2|(null)\nnode0|long|mixed-|128+|1031000|gpu:a100:4(S:0-1),shard:8|ib,a100\n"
    assert read_nodes(text) == [
        NodeInfo(name="node0", partition="spot", state="idle", cpus=8, memory=16000, gpus=2),
        NodeInfo(name="node0", partition="long", state="mixed-", cpus=128, memory=1031000, gpus=4,
                 gpus_of_types={"a100": 4}, features=frozenset({"ib", "a100"})),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("(null)", 0), ("gpu:2", 2), ("gpu:a:2,gpu:b:1", 3), ("gpu:nvidia_a100-pcie:8(S:0-1)", 8), ("nic:1", 0), ("", 0)],
)
def test_gpus_of_a_node_are_counted_over_all_kinds(gres: str, gpus: int) -> None:
    [node] = read_nodes(f"n|p|idle|1|1|{gres}|(null)")
    assert node.gpus == gpus


@pytest.mark.parametrize(
    ("usable", "states"),
    [(True, ("idle", "allocated+", "completing", "idle~", "planned", "SOMETHING_NEW")),
     (False, ("down", "drained", "draining@", "idle*", "fail", "unknown"))],
)  # fmt: skip
def test_a_nodes_state_says_whether_it_can_get_a_job(usable: bool, states: tuple[str, ...]) -> None:
    assert {NodeInfo(name="n", partition="p", state=state).usable for state in states} == {usable}


# --- scontrol show job --------------------------------------------------------------------------------------------


def test_fields_of_a_job_are_read_except_the_users_own_text() -> None:
    text = (
        "JobId=7 JobName=a Requeue=0 ExcNodeList=x\n"
        "   JobState=COMPLETING Reason=None Dependency=(null)\n"
        "   Requeue=1 Restarts=1 BatchFlag=1\n"
        "   ReqNodeList=(null) ExcNodeList=node[1,3]\n"
        "   WorkDir=/a Requeue=0 ReqNodeList=y\n   Comment=ReqNodeList=z Partition=w\n"
    )
    assert read_job(text) == {
        "JobState": "COMPLETING",
        "Requeue": "1",
        "Restarts": "1",
        "BatchFlag": "1",
        "ExcNodeList": "node[1,3]",
    }
