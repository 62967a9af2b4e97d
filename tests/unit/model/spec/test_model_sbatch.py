"""Which options of sbatch a spec may set."""

from __future__ import annotations

import pytest

from slurmtrain.model.spec.sbatch import OPTIONS, OWNED, canonical_option, check_sbatch_option


@pytest.mark.parametrize("name", ["partition", "mail-type", "mail_type", "qos", "gres", "mem-per-cpu", "no_kill"])
def test_an_option_may_be_written_with_dashes_or_underscores(name: str) -> None:
    check_sbatch_option(name)


@pytest.mark.parametrize(
    ("name", "near"), [("partitoin", "partition"), ("acount", "account"), ("mail_typ", "mail-type")]
)
def test_an_unknown_option_is_refused_with_the_nearest_known_one(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"sbatch has no option --{canonical_option(name)}; did you mean '{near}'\?"):
        check_sbatch_option(name)


@pytest.mark.parametrize("name", sorted(OWNED))
def test_an_option_that_slurmtrain_sets_is_refused_with_the_place_to_say_it(name: str) -> None:
    with pytest.raises(ValueError, match="slurmtrain sets this option itself: "):
        check_sbatch_option(name)


def test_an_owned_option_is_never_suggested() -> None:
    with pytest.raises(ValueError, match="sbatch has no option --node") as raised:
        check_sbatch_option("node")
    assert "'nodes'" not in str(raised.value)


@pytest.mark.parametrize("name", [5, None, True])
def test_a_name_that_is_no_text_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match="expected the long name of an sbatch option"):
        check_sbatch_option(name)


def test_all_names_are_written_as_sbatch_writes_them() -> None:
    assert {canonical_option(name) for name in OPTIONS} == OPTIONS
    assert OWNED.keys() <= OPTIONS
    assert canonical_option("--mail_type") == "mail-type"
