"""The notice of a worker whose GPU this build's kernels have no code for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from atoll.agent.runtime.session import kernel_notice
from atoll.agent.runtime.session.session import Session
from atoll.kernels.cuda_device import NoCode


def test_a_worker_says_once_for_each_device_that_kernels_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    session = cast(
        Session, SimpleNamespace(place=SimpleNamespace(rank=3), notice=lambda _level, text: said.append(text))
    )
    missing: dict[Any, NoCode] = {torch.device("cuda", 0): NoCode("the build has no code for 7.0", "use CUDA 12")}
    monkeypatch.setattr(kernel_notice, "why_on_cpu", missing.get)
    monkeypatch.setattr(kernel_notice, "_announced", set())
    for device in (torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)):
        kernel_notice.announce_cpu_kernels(session, device)
    (text,) = said
    assert text.startswith("rank 3 runs Atoll's kernels on the CPU")
    assert text.endswith("the build has no code for 7.0; use CUDA 12")
