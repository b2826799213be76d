"""Runs one stage: python -P -m gpu_check.stage_process MODULE DEVICE FILE FOLDER."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from gpu_check.rows import Rows


def main() -> None:
    module, device, path, out = sys.argv[1:]
    rows = Rows(Path(path), Path(out))
    try:
        importlib.import_module(module).run(device, rows)
    except Exception:  # noqa: BLE001 - a stage's failure is its result
        rows.check("the stage itself", False, traceback.format_exc())


if __name__ == "__main__":
    main()
