"""Which devices a strategy may take together, where some are behind NAT."""

from __future__ import annotations

from atoll.controller.jobs.model.connectivity import relay_notice, within_reach
from atoll.controller.jobs.model.start import FreeDevice
from atoll.controller.state.records import NodeRecord, RunMember


def node(name: str, island: str, behind_nat: bool = False) -> NodeRecord:
    return NodeRecord(
        name=name, island=island, address="10.0.0.1", memory_bytes=1, devices=(), version="0", behind_nat=behind_nat
    )


NODES = {
    one.name: one
    for one in (node("lab", "lab"), node("cloud", "cloud"), node("h1", "home", True), node("h2", "home", True))
}


def chosen(strategy: str, *nodes: str, seats: tuple[str, ...] = ()) -> tuple[list[str], str]:
    free = [FreeDevice(name, 0, "cpu", 1.0, 0.0) for name in nodes]
    found = within_reach(strategy, free, lambda: NODES, seats)
    return [device.node for device in found.devices], found.why


def test_strategies_that_go_through_the_relay_take_all() -> None:
    for strategy in ("local-steps", "stale-sparse", "zen", "compressed"):
        assert chosen(strategy, "lab", "h1") == (["lab", "h1"], "")


def test_others_take_those_that_dial_each_other_and_name_who_is_left_out_and_what_to_do() -> None:
    nodes, why = chosen("dense", "lab", "cloud", "h1")
    assert nodes == ["lab", "cloud"]
    assert "strategy dense" in why
    assert "h1" in why
    assert "--strategy stale-sparse or local-steps" in why
    nodes, why = chosen("dense", "lab", "h1", "h2")
    assert nodes == ["h1", "h2"]
    assert "lab" in why
    assert chosen("dense", "h1", "h2") == (["h1", "h2"], "")
    assert chosen("dense", "lab", "cloud") == (["lab", "cloud"], "")


def test_a_run_grows_by_what_all_of_it_dials() -> None:
    assert chosen("dense", "cloud", "h1", seats=("lab",))[0] == ["cloud"]
    assert chosen("dense", "lab", "h2", seats=("h1",))[0] == ["h2"]


def test_the_events_say_which_links_are_relayed() -> None:
    home = RunMember(
        rank=0, node="h1", device=0, node_rank=0, local_rank=0, local_world_size=1, island="home", behind_nat=True
    )
    lab = RunMember(rank=1, node="lab", device=0, node_rank=1, local_rank=0, local_world_size=1, island="lab")
    assert "h1" in relay_notice([home, lab])
    assert relay_notice([home]) == ""
    assert relay_notice([lab]) == ""
