"""The program that installs a job's requirements: uv where the machine has it, else the agent's pip."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from atoll.errors import NotFound


def install_command(python: Path, requirements: Path, env: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the installer's name and command line. Raises NotFound if there is none."""
    own = Path(sys.executable).parent
    if uv := shutil.which("uv", path=os.pathsep.join((env.get("PATH", os.defpath), str(own)))):
        return "uv pip", [uv, "pip", "install", "--python", str(python), "--requirement", str(requirements)]
    if importlib.util.find_spec("pip") is None:
        raise NotFound("the job has requirements, and its node neither uv nor pip. Install one of them beside atoll")
    options = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    return "pip", [str(python), "-m", "pip", "install", *options, "--requirement", str(requirements)]
