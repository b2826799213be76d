from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
import typer.testing
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

from scripted_controller import ScriptedController

# A runner builds all commands for each that it invokes: most of what a short one costs.
typer.testing._get_command = cache(typer.main.get_command)


@pytest.fixture
def controller() -> Iterator[ScriptedController]:
    """A controller that leads and has no jobs."""
    with ScriptedController() as started:
        yield started


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    """Runs `atoll` in this process, in an empty folder and without the user's environment."""
    for name in ("ATOLL_CONTROLLER", "ATOLL_TLS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return CliRunner()
