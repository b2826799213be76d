from __future__ import annotations

from atoll.controller.jobs.model.peer_links import PeerLink, PeerLinks


def test_between_takes_the_higher_median_of_the_newest_pairs_in_one_direction() -> None:
    """Pairs that are measured at once share the link; what was measured long before the newest may be over."""
    links = PeerLinks(
        {
            ("a", "x"): PeerLink(0.01, 100.0, 5.0),
            ("a", "y"): PeerLink(0.03, 300.0, 37.0),
            ("b", "x"): PeerLink(0.02, 200.0, 10.0),
            ("b", "y"): PeerLink(0.07, 900.0, 6.0),
            ("x", "a"): PeerLink(0.5, 1.0, 9.0),
        }
    )
    assert links.between(["a", "b"], ["x", "y"]) == PeerLink(0.025, 300.0, 37.0)
    assert links.between(["x"], ["a", "b"]) == PeerLink(0.5, 1.0, 9.0)


def test_between_is_none_without_a_measured_pair() -> None:
    links = PeerLinks({("a", "a"): PeerLink(0.0, 1.0, 0.0), ("a", "b"): PeerLink(0.0, 1.0, 0.0)})
    assert links.between(["a"], ["a"]) is None
    assert links.between(["b"], ["a"]) is None


def test_links_by_island_are_those_between_the_islands_nodes() -> None:
    def link(bps: float) -> PeerLink:
        return PeerLink(rtt_s=0.01, bandwidth_bps=bps, measured_unix_s=1.0)

    links = PeerLinks({("a", "b"): link(9e8), ("a", "c"): link(1e7), ("b", "c"): link(3e7), ("c", "x"): link(1.0)})
    found = links.by_island({"a": "home", "b": "home", "c": "lab"})
    assert found.keys() == {("home", "home"), ("home", "lab")}
    assert found["home", "lab"] == links.between(["a", "b"], ["c"])
    assert found["home", "home"] == links.between(["a", "b"], ["a", "b"])
