"""Which tests on real runs and dear unit tests ``scripts/test`` runs, and for which ones a change asks besides.

A run costs ten to thirty seconds, so that all tests of tests/local and tests/cluster take most of an hour: they are for
``scripts/test --all``. Those below pass between them through every cause of an end, every launcher, a requeue on each
version of Slurm, and a restore under another strategy on other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

# The causes for which an attempt ends (slurmtrain.model.run.run.CAUSES), and what tests prove of each.
CAUSES = {
    "completed": (
        "local/test_runs.py::test_a_run_over_two_nodes_completes_and_each_rank_has_its_log",
        "local/test_runs.py::test_what_a_run_leaves_behind_is_for_its_owner_alone",
    ),
    "preempted": (
        "cluster/test_slurm_interruptions.py::test_preemptions_lose_no_step_and_the_record_has_the_curve_of_an_undisturbed_run",
        "cluster/test_slurm_requeues.py::test_runs_that_are_over_after_a_preemption_are_not_started_again",
    ),
    "timeout": ("local/test_runs.py::test_a_run_stops_before_its_time_limit_and_can_go_on_with_another",),
    "node_fail": ("cluster/test_slurm_interruptions.py::test_a_run_with_a_spare_continues_when_a_node_dies",),
    "oom": ("cluster/test_slurm_runs.py::test_a_run_that_ran_out_of_memory_gets_a_job_with_more",),
    "crash": ("local/test_runs.py::test_a_killed_worker_is_named_with_its_signal_and_all_start_again_where_they_were",),
    "hang": (
        "local/test_hangs.py::test_a_rank_that_waits_for_ever_hangs_and_so_does_one_that_computes_for_ever[wait]",
    ),
    "preflight": (
        "cluster/test_slurm_ledger.py::test_a_node_whose_clock_is_5_s_ahead_is_named_and_the_job_goes_on_without_it",
    ),
    "cancelled": ("cluster/test_slurm_runs.py::test_a_running_run_is_cancelled_with_what_it_has_saved",),
    "lost": (
        "local/test_kill_and_resume.py::test_a_run_killed_at_random_steps_and_resumed_ends_with_the_weights_and_the_curve_of_an_undisturbed_one[0]",
    ),
    "early": ("cluster/test_slurm_chains.py::test_cancelling_a_run_ends_at_once_what_waits_for_it",),
    "upstream": ("local/test_chains.py::test_runs_wait_for_others_and_say_why_they_cannot_start",),
}
# Who starts the ranks: tests/local/test_launchers.py.
_LAUNCHED = "local/test_launchers.py::test_training_that_a_launcher_has_started_continues_from_its_newest_checkpoint"
LAUNCHERS = {
    "torchrun": f"{_LAUNCHED}[torchrun-killed in a save]",
    "accelerate": f"{_LAUNCHED}[accelerate-preempted]",
    "deepspeed": f"{_LAUNCHED}[deepspeed-preempted]",
    "megatron": f"{_LAUNCHED}[megatron-killed]",
    "spawn": f"{_LAUNCHED}[spawn-cancelled]",
}
# What else a user meets in the first weeks.
FURTHER = (
    "local/test_tour.py::test_a_new_users_tour",
    "local/test_experiments.py::test_there_is_a_test_for_every_experiment",
    "local/test_experiments_gpt.py::test_there_is_a_test_for_every_spec_of_the_gpt",
    "local/test_experiments_gpt.py::test_zero3_is_stopped_and_goes_on_as_zero1_on_half_the_processes",
    "local/test_faults.py::test_a_submission_killed_at_any_moment_is_finished_by_the_next_sync_and_never_doubled",
    "local/test_runs.py::test_secrets_reach_the_script_and_no_file",
    "local/test_report.py::test_a_run_as_a_page_has_the_figures_of_show_and_text_stays_text",
    "local/test_same_meaning.py::test_each_key_is_in_the_table_or_tested_elsewhere",
    "local/test_same_meaning.py::test_ranks_see_what_the_spec_says",
    "local/test_stops.py::test_what_a_killed_agent_has_left_behind_is_ended_before_the_run_trains_again",
    "local/test_own_checkpoints.py::test_a_run_that_rewrites_one_file_goes_on_as_long_as_its_content_changes",
    "local/test_why_failures.py::test_the_first_line_says_what_happened[exception]",
    "local/test_why_failures.py::test_the_first_line_says_what_happened[misspelt module]",
    "cluster/test_slurm_asking.py::test_any_command_asks_squeue_once_and_sacct_at_most_once[1]",
    "cluster/test_slurm_hostlist.py",
    "cluster/test_slurm_runs.py::test_slurm_takes_the_golden_scripts",
    "cluster/test_slurm_same_meaning.py::test_ranks_see_what_the_spec_says",
    "cluster/test_slurm_why.py::test_waiting_runs_say_why_and_what_would_start_sooner",
)
# Of the dear unit tests, one that proves the most of each file.
UNITS = (
    "unit/runtime/training/test_strategies_step.py::test_four_processes_do_what_one_does[zero1-fp16-2]",
    "unit/runtime/training/test_evaluation.py::test_an_evaluation_has_the_mean_of_all_samples_and_changes_nothing[ddp]",
    "unit/plugins/strategies/test_feedback_hooks.py::test_an_interrupted_run_is_the_same_bit_for_bit[topk]",
    "unit/plugins/strategies/test_pipeline.py::test_stages_train_as_on_one_process[1f1b]",
    "unit/plugins/strategies/test_tensor.py::test_divided_layers_train_as_on_one_process[ddp-tp]",
)
EVERYDAY = (*(test for tests in CAUSES.values() for test in tests), *LAUNCHERS.values(), *FURTHER, *UNITS)

_ALL = ("local/", "cluster/")
# What a change of a part of the project asks for: how its path begins, and how the paths of tests do. The longest one
# that fits counts; a part that is not listed asks for nothing but the tests of every day.
TESTS_OF = {
    "slurmtrain/": _ALL,
    "slurmtrain/api/": ("local/test_python_docs.py", "cluster/test_slurm_python.py"),
    "slurmtrain/cli/": ("local/test_tour.py", "local/test_docs_examples.py", "local/test_checkpoint_commands.py"),
    "slurmtrain/ops/shared/looking.py": ("local/test_serve.py", "local/test_top.py"),
    "slurmtrain/plugins/serve/": ("local/test_serve.py",),
    "slurmtrain/plugins/top/": ("local/test_top.py",),
    "slurmtrain/history.py": ("local/test_script_metrics.py", "local/test_mlflow_server.py"),
    "slurmtrain/integrations/": ("local/test_trainers.py", "cluster/test_slurm_trainers.py"),
    "slurmtrain/local.py": ("local/",),
    "slurmtrain/model/diagnosis/": ("local/test_hangs.py", "cluster/test_slurm_doctor.py"),
    "slurmtrain/model/preflight/": ("cluster/test_slurm_network.py", "cluster/test_slurm_ledger.py"),
    "slurmtrain/model/query/": (),
    "slurmtrain/ops/delete.py": ("local/test_deleted_runs.py", "cluster/test_slurm_lost_files.py"),
    "slurmtrain/ops/diagnose.py": ("cluster/test_slurm_doctor.py",),
    "slurmtrain/ops/why.py": ("cluster/test_slurm_why.py",),
    "slurmtrain/plugins/scale/": ("local/test_scale.py", "cluster/test_slurm_scale.py"),
    "slurmtrain/plugins/drill/": ("local/test_drill.py", "cluster/test_slurm_drill.py"),
    "slurmtrain/plugins/": ("local/test_odd_names.py",),
    "slurmtrain/ops/query/": (),
    "slurmtrain/plugins/report/": ("local/test_report", "local/test_serve.py", "cluster/test_slurm_report.py"),
    "slurmtrain/plugins/search.py": ("local/test_search.py", "cluster/test_slurm_search.py"),
    "slurmtrain/registry/": ("local/test_faults.py", "local/test_locks.py", "local/test_unreadable_runs.py"),
    "slurmtrain/runtime/upstreams.py": ("local/test_chains.py", "cluster/test_slurm_chains.py"),
    "slurmtrain/runtime/checkpoint/": (
        "local/test_faults.py", "local/test_kill_and_resume.py", "local/test_resharding.py", "local/test_forks.py",
        "local/test_own_checkpoints.py", "local/test_checkpoint_commands.py", "local/test_experiments_gpt.py",
        "cluster/test_slurm_interruptions.py", "cluster/test_slurm_forks.py",
    ),
    "slurmtrain/runtime/code/": ("local/test_code.py", "local/test_repeat.py", "cluster/test_slurm_code.py"),
    "slurmtrain/runtime/training/profiling.py": ("local/test_measures.py",),
    "slurmtrain/ops/shared/run_measures.py": ("local/test_measures.py",),
    "slurmtrain/runtime/training/loader.py": (
        "local/test_loader.py", "local/test_stops.py", "cluster/test_slurm_stops.py",
    ),
    "slurmtrain/plugins/growth.py": ("cluster/test_slurm_growth.py",),
    "slurmtrain/runtime/preflight/": ("cluster/test_slurm_network.py", "cluster/test_slurm_ledger.py"),
    "slurmtrain/runtime/agent/script_metrics.py": ("local/test_script_metrics.py", "local/test_stops.py"),
    "slurmtrain/runtime/agent/helpers.py": ("local/test_node_helpers.py", "cluster/test_slurm_node_helpers.py"),
    "slurmtrain/runtime/environment/setup_script.py": (
        "local/test_same_meaning.py", "cluster/test_slurm_same_meaning.py",
    ),
    "slurmtrain/runtime/training/strategy_interface.py": (
        "local/test_experiments", "local/test_resharding.py", "cluster/test_slurm_strategies.py",
    ),
    "slurmtrain/runtime/agent/monitor.py": ("local/test_stops.py",),
    "slurmtrain/slurm/": ("cluster/",),
    "slurmtrain/snapshots/": ("local/test_code.py", "cluster/test_slurm_code.py"),
    "slurmtrain/specfile/": ("local/test_same_meaning.py", "local/test_tour.py"),
    "slurmtrain/tracking/": ("local/test_mlflow_server.py", "local/test_odd_names.py", "local/test_ui.py"),
    "templates/": ("local/test_privacy.py", "local/test_same_meaning.py", "cluster/"),
    "experiments/": ("local/test_experiments",),
    "docs/": ("local/test_docs_examples.py", "local/test_python_docs.py"),
    "README.md": ("local/test_docs_examples.py",),
    "pyproject.toml": ("local/test_distribution.py",),
    "scripts/slurmcluster/": ("cluster/",),
}  # fmt: skip
# Unit tests that take long and are of parts which few users touch: how their ids begin, and which changes ask for them.
_CHECKPOINTS = ("slurmtrain/runtime/checkpoint/", "tests/helpers/ranks.py")
_STRATEGIES = (
    "slurmtrain/runtime/training/strategy_interface.py", "slurmtrain/runtime/training/passes.py",
    "slurmtrain/plugins/strategies/", "slurmtrain/runtime/job/process_group.py",
    "slurmtrain/model/experiment/strategy.py", "tests/helpers/word_training.py", *_CHECKPOINTS,
)  # fmt: skip
DEAR_UNITS = {
    "unit/runtime/training/test_strategies_activations.py": _STRATEGIES,
    "unit/runtime/training/test_strategies_step.py": _STRATEGIES,
    "unit/runtime/training/test_evaluation.py": _STRATEGIES,
    "unit/plugins/strategies/test_feedback_hooks.py": _STRATEGIES,
    "unit/plugins/strategies/test_pipeline.py": _STRATEGIES,
    "unit/plugins/strategies/test_tensor.py": _STRATEGIES,
    "unit/runtime/checkpoint/test_formats_of_trainers.py": (
        "slurmtrain/runtime/checkpoint/", "slurmtrain/plugins/trainer_formats.py", "tests/helpers/saving_scripts/",
    ),
}  # fmt: skip


def is_everyday(test: str) -> bool:
    """Whether ``scripts/test`` runs a test; ``test``: its id, relative to tests."""
    return not test.startswith((*_ALL, *DEAR_UNITS)) or any(_is_of(test, each) for each in EVERYDAY)


def asked_for(test: str, changed: Iterable[str]) -> bool:
    """Whether a change asks for a test on real runs, or for a dear unit test.

    Args:
        test: Its id, relative to tests.
        changed: The paths that differ, relative to the project.
    """
    parts = [part for unit, parts in DEAR_UNITS.items() if test.startswith(unit) for part in (f"tests/{unit}", *parts)]
    if parts:
        return any(path.startswith(tuple(parts)) for path in changed)
    return any(test.startswith(beginning) for path in changed for beginning in _tests_of(path))


def _tests_of(path: str) -> tuple[str, ...]:
    if path.startswith(tuple(f"tests/{folder}test_" for folder in _ALL)):
        return (path.removeprefix("tests/"),)
    return TESTS_OF[max(fitting, key=len)] if (fitting := [part for part in TESTS_OF if path.startswith(part)]) else ()


def _is_of(test: str, listed: str) -> bool:
    """Whether a test is that, in that file, or with any parameter of that."""
    return test == listed or test.startswith((f"{listed}::", f"{listed}["))
