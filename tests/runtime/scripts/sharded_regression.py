"""regression.py, whose state is worth a shard of each rank."""

from __future__ import annotations

import runpy
from pathlib import Path

from atoll.agent.runtime.checkpoints.disk import files

files.SHARD_BYTES, files.SMALL_BYTES = 64, 1  # type: ignore[misc]
runpy.run_path(str(Path(__file__).with_name("regression.py")), run_name="__main__")
