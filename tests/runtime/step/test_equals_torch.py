from __future__ import annotations

from pathlib import Path

import pytest
from held_ports import free_port
from zmq_agent import Start, torchrun_like

pytestmark = pytest.mark.timeout(300)


def test_exact_settings_train_what_plain_torch_trains(start: Start, tmp_path: Path) -> None:
    """The same weights as one process with the whole batch, and p.grad of None in the same steps.

    1. Convolutions in channels_last, transposed, permuted and 0-dim parameters with fused optimizers, resumed from a
    checkpoint too: gradients, moments and residuals lie in memory as their parameters. 2. Experts that a step leaves
    out and a layer that is frozen later stand still, whatever compression had left out of their gradients. 3. What the
    script writes to weights after an update, in the second epoch, is part of that update."""
    ports, islands = ",".join(str(free_port()) for _ in range(12)), ("west", "west", "east")
    codes = torchrun_like("equals_torch.py", ports, str(tmp_path), world_size=3, islands=islands, start=start)
    assert codes == [0] * 3
