from __future__ import annotations

import pytest

from atoll.controller.jobs.agents.sessions import gpu_refusal
from atoll.controller.state.records import DeviceRecord, NodeRecord


def node(name: str, sharers: int, uuid: str = "GPU-77") -> NodeRecord:
    gpu = DeviceRecord(index=0, kind="cuda", model="RTX", memory_bytes=1, speed=1.0, uuid=uuid, sharers=sharers)
    return NodeRecord(name=name, island="x", address="10.0.0.1", memory_bytes=1, devices=(gpu,), version="0")


@pytest.mark.parametrize(
    ("sharers", "others", "said"),
    [
        (1, [], ""),
        (3, [], ""),
        (3, [3], ""),
        (3, [3, 3], ""),
        (0, [1], ": two jobs would share it. Stop one of both, leave each its own GPUs with CUDA_VISIBLE_DEVICES, or"),
        (1, [3], ", which shares it as one of 3 agents. Give this agent --share-gpu 3, or leave it its own GPUs with"),
        (2, [0], ", which has it for itself. Start that agent with --share-gpu 2 too, or stop it"),
        (2, [3], ", which shares it as one of 3 agents. Give this agent --share-gpu 3"),
        (2, [2, 2], "; 2 agents may share it, and a, b do. Stop one of them, or start all with --share-gpu 3"),
    ],
)
def test_a_gpu_is_shared_by_agreement_alone(sharers: int, others: list[int], said: str) -> None:
    """Every agent on it must say with how many it shares the GPU, and all the same: each announces that part of it."""
    there = {name: node(name, number) for name, number in zip("abc", others, strict=False)}
    why = gpu_refusal(node("new", sharers), there)
    assert why.startswith(f"GPU 0 of 'new' (RTX, GPU-77) is GPU 0 of the agent 'a', from 10.0.0.1{said}") == bool(said)
    assert bool(why) == bool(said)


def test_gpus_without_a_uuid_are_not_compared() -> None:
    assert not gpu_refusal(node("new", 1, uuid=""), {"a": node("a", 1, uuid="")})
