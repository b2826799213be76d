from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks" / folder) for folder in (".", "scripts")]
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))  # for warm
