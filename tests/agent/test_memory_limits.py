"""The memory that an agent may use is that of its container, not that of the machine around it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from atoll.host.memory_limits import available_bytes, total_bytes

MB = 1 << 20


def group(folder: Path, names: tuple[str, str], limit: str, used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip((*names, "memory.stat"), (limit, str(used), stat), strict=True):
        (folder / name).write_text(f"{content}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_around_this_process_counts(tmp_path: Path, version: int) -> None:
    """1. A container of 64 MB on a machine of many GB. 2. The agent asked the machine: copies of others' state took
    more than the container may have, and its workers were killed. 3. Of what is in use, files that were read can go."""
    own, root = tmp_path / "own", tmp_path / "cgroups"
    if version == 2:
        own.write_text("0::/jobs/one\n")
        outer, names, cached = root, ("memory.max", "memory.current"), "inactive_file"
    else:
        own.write_text("5:devices:/\n4:memory:/jobs/one\n0::/\n")
        outer, names, cached = (
            root / "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_inactive_file",
        )
    group(outer / "jobs", names, str(100 * MB), 90 * MB, f"{cached} {70 * MB}")
    group(outer / "jobs/one", names, str(64 * MB), 40 * MB, f"{cached} {10 * MB}\nother 5")
    assert total_bytes(root, own) == 64 * MB
    assert available_bytes(root, own) == 34 * MB
    group(outer / "jobs/one", names, "max" if version == 2 else str(2**63), 40 * MB, f"{cached} 0")
    assert total_bytes(root, own) == 100 * MB
    assert available_bytes(root, own) == 80 * MB


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:memory:/not/seen/from/here\n0::/\n")
    for own in ("own", "none"):
        assert total_bytes(tmp_path, tmp_path / own) == psutil.virtual_memory().total
        assert available_bytes(tmp_path, tmp_path / own) > 0
