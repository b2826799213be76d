"""Runs stages, each in a process of its own with a limit, and reports on them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from gpu_check.rows import Outcome, Row, read_rows
from gpu_check.stages import Stage

WHOLE_LIMIT_S: Final = 540.0
"""Of all stages together."""
ENDS_WITHIN_S: Final = 5.0
"""A stage that was asked to end is killed after this."""
LEAST_S: Final = 10.0
"""A stage that would have less time than this is not begun."""
CPU_FACTOR: Final = 4.0
"""Without a GPU, on a machine that may do other things as well, a stage may take so many times as long."""
MAX_OUTPUT_BYTES: Final = 4 << 20
"""Of a stage's output that is kept: its end."""


@dataclass(frozen=True, slots=True)
class Result:
    stage: Stage
    outcome: Outcome
    reason: str
    seconds: float
    rows: Sequence[Row] = ()


def run_stages(
    stages: Sequence[Stage],
    device: str,
    out: Path,
    environment: Mapping[str, str],
    whole_limit_s: float = WHOLE_LIMIT_S,
    began_s: float | None = None,
) -> Sequence[Result]:
    """Run the stages one after the other; none stops the next. Writes out/gpu-check.json after each.

    began_s: monotonic, from when the whole limit counts; now where it is None."""
    ends_s = (time.monotonic() if began_s is None else began_s) + whole_limit_s
    results: list[Result] = []
    for stage in stages:
        limit_s = stage.limit_s * (CPU_FACTOR if device == "cpu" else 1.0)
        print(f"stage {stage.number}, {stage.title}: at most {limit_s:g} s", flush=True)
        left_s = ends_s - time.monotonic() - ENDS_WITHIN_S
        if left_s < min(LEAST_S, limit_s):
            results.append(Result(stage, "skipped", "no time was left for it", 0.0))
        else:
            results.append(run_stage(stage, device, out, environment, min(limit_s, left_s)))
        report = {"device": device, "stages": [asdict(one) for one in results]}
        (out / "gpu-check.json").write_text(json.dumps(report, indent=1))
    return results


def run_stage(stage: Stage, device: str, out: Path, environment: Mapping[str, str], limit_s: float) -> Result:
    """Run a stage in a process of its own. Its output goes to out/output.txt, for all stages together."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch, tempfile.TemporaryFile() as output:
        path = Path(scratch) / "rows"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gpu_check.stage_process", stage.module, device, str(path), str(out)],
            env={**environment, "TMPDIR": scratch},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        late = False
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late, code = True, end_group(process)
        finally:
            end_group(process)  # what the stage left running, and all of it where this command is interrupted
        rows = read_rows(path)
        said = _end_of(output.fileno())
    with (out / "output.txt").open("a", encoding="utf-8") as log:
        log.write(f"==== stage {stage.number}, {stage.title}\n{said}\n")
    why = f"took more than {limit_s:.0f} s" if late else f"its process ended with exit code {code}" if code else ""
    seconds = time.monotonic() - began_s
    return Result(stage, *_judged(rows, why, said), seconds, rows)


def _judged(rows: Sequence[Row], why: str, said: str) -> tuple[Outcome, str]:
    failed = [row.name for row in rows if row.outcome == "failed"]
    if why or failed:
        last = next(reversed(said.strip().splitlines()), "") if why and not rows else ""
        return "failed", "; ".join(part for part in (why, ", ".join(failed), last) if part)
    if all(row.outcome == "skipped" for row in rows):
        return "skipped", rows[0].text if rows else "it found nothing to do"
    skipped = sum(row.outcome == "skipped" for row in rows)
    return "passed", f"{skipped} of {len(rows)} rows skipped" if skipped else ""


def end_group(process: subprocess.Popen[bytes]) -> int:
    """End a process and its group: ask, then kill. Returns its exit code."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_WITHIN_S)
    _signal_group(process, signal.SIGKILL)
    return process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end_of(descriptor: int) -> str:
    length = os.fstat(descriptor).st_size
    return os.pread(descriptor, MAX_OUTPUT_BYTES, max(0, length - MAX_OUTPUT_BYTES)).decode(errors="replace")


def print_table(results: Sequence[Result]) -> None:
    """Print each stage and its rows, the failed ones with the end of what they said."""
    for result in results:
        stage = result.stage
        print(f"\n{stage.number} {stage.title}: {result.outcome}, {result.seconds:.1f} s  {result.reason}".rstrip())
        for row in result.rows:
            text = row.text if row.outcome != "failed" else " / ".join(row.text.strip().splitlines()[-3:])
            print(f"   {row.outcome:8}{row.name}  {text}".rstrip())
    counts = {outcome: sum(one.outcome == outcome for one in results) for outcome in ("passed", "failed", "skipped")}
    print(f"\nstages: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}", flush=True)
