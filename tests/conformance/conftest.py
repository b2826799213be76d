from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "strategies" / "groups"))  # for scheduled_runs
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))  # for zmq_agent and warm
sys.path.insert(0, str(Path(__file__).parent))

from worker_fixtures import start, stock

__all__ = ["start", "stock"]
