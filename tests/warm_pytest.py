"""Pytest in a process that was forked with torch imported (tests/runtime/warm.py), as `scripts/test` starts it.

The process that workers are forked from is forked first, as long as nothing of pytest is imported here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    sys.path[0] = str(root)  # as `python -m pytest` does
    sys.path.insert(1, str(root / "tests" / "runtime"))
    from warm import ForkedServer, WarmStock

    os.setpgid(0, 0)
    with WarmStock(ForkedServer()) as WarmStock.of_pytest:
        import pytest

        code = pytest.main(sys.argv[1:])
    sys.exit(code)
