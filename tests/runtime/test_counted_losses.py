"""Losses that are no mean over a rank's own samples, against plain torch on the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from held_ports import free_port
from zmq_agent import Start, torchrun_like

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("world_size", [1, 3])
def test_means_over_tokens_sums_and_gathered_features_train_as_the_whole_batch_does(
    tmp_path: Path, start: Start, world_size: int
) -> None:
    """They were weighed by samples, b_i / B: a rank whose samples had few tokens counted as much as any. Four
    strategies, with one pass an update and three under no_sync; the script says each."""
    ports = ",".join(str(free_port()) for _ in range(5))
    with (tmp_path / "log").open("wb") as log:
        codes = torchrun_like("counted_losses.py", ports, world_size=world_size, start=start, log=log)
    assert codes == [0] * world_size, (tmp_path / "log").read_text()
