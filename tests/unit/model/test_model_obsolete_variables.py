"""Which variables are pointed out, and with what advice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmtrain.model.environment import OBSOLETE, describe_obsolete, describe_overruled

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "network-profiles.md").read_text()
SHIM = "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE"
OURS = {"NCCL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "eth1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "21000"}


@pytest.mark.parametrize("name", OBSOLETE)
def test_each_variable_is_pointed_out_in_a_sentence_that_names_it(name: str) -> None:
    (sentence,) = describe_obsolete({name: "1", "PATH": "/bin"})
    assert sentence.startswith(f"{name} ")
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NCCL_IB_GID_INDEX": "-1"},
        {"NCCL_BUFFSIZE": ""},
        {"TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_IB_HCA": "=mlx5_0", "NCCL_NET": "IB", "FI_PROVIDER": "efa"},
    ],
)
def test_what_is_in_order_is_not_pointed_out(environ: dict[str, str]) -> None:
    assert describe_obsolete(environ) == []


@pytest.mark.parametrize("google", [{"NCCL_NET": "gIB"}, {SHIM: "/var/lib/tcpxo/lib64/a3plus_guest_config.textproto"}])
def test_what_googles_scripts_set_for_nccl_is_left_to_them(google: dict[str, str]) -> None:
    environ = {**google, "NCCL_MIN_NCHANNELS": "4", "NCCL_IB_GID_INDEX": "3", "NCCL_BLOCKING_WAIT": "1"}
    assert [sentence.split()[0] for sentence in describe_obsolete(environ)] == ["NCCL_BLOCKING_WAIT"]


def test_a_variable_that_differs_from_ours_is_named_with_both_values() -> None:
    (sentence,) = describe_overruled({"MASTER_PORT": "29500", "MASTER_ADDR": "10.0.0.1", "LR": "1"}, OURS)
    assert sentence == "MASTER_PORT is '29500' in env, but slurmtrain sets it to '21000'; leave it out."


def test_a_variable_of_an_interface_is_answered_with_where_to_pin_it() -> None:
    sentence = describe_overruled(
        {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth1", "TP_SOCKET_IFNAME": "eth0"}, OURS
    )
    assert [sentence.split()[0] for sentence in sentence] == ["NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"]
    assert all("network.interface" in sentence for sentence in sentence)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_what_each_process_has_of_its_own_cannot_be_set_for_all(name: str) -> None:
    (sentence,) = describe_overruled({name: "0"}, OURS)
    assert sentence.startswith(f"{name} is '0' in env, but slurmtrain sets it; leave it out")


def test_the_page_for_users_lists_what_is_pointed_out() -> None:
    table = PAGE[PAGE.index("## Variables that preflight warns about") :]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert listed == set(OBSOLETE)
