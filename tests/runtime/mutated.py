"""JSON that was tampered with by somebody who can compute hashes: one value of it is another."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 2, 1.5, "", "x", [], {}, [[]], [None], {"": 0}, {"tensor": "none"}),
        *(2**31, 2**62, 2**63, 2**64, 10**30, -(2**63), float("inf"), float("-inf"), float("nan"), 1e308),
        *([10**30], [0, 10**30], [2**62, 2**62], [-1], [1.5], ["x"], {"tuple": [1]}, {"dict": [[1]]}, {"size": [-1]}),
        *({"size": [10**30]}, {"float": "x"}, {"float": []}, {"module": [[], []]}, {"numpy-array": []}, "x" * 5000),
        json.loads("[" * 140 + "]" * 140),
    ]
)


def places(body: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All paths into it."""
    inside = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


@st.composite
def mutated(draw: st.DrawFn, body: Any) -> Any:
    """`body` with up to three of its values replaced or left out, or exchanged for another one of it."""
    changed = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(changed)))
        if not path:
            continue
        parent = value_at(changed, path[:-1])
        match draw(st.sampled_from(["odd", "gone", "other"])):
            case "odd":
                parent[path[-1]] = copy.deepcopy(draw(ODD))
            case "gone":
                del parent[path[-1]]
            case _:
                parent[path[-1]] = copy.deepcopy(value_at(changed, draw(st.sampled_from(places(changed)))))
    return changed


def value_at(body: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        body = body[key]
    return body
