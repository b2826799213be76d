"""Classify a worker's exit by its code, the agent's signals, and its last output. Pure."""

from __future__ import annotations

import re
import signal
from typing import Final

from atoll.agent.supervisor.processes.events import Ended, Exit, ExitKind
from atoll.errors import exit_codes
from atoll.network.message_limits import MAX_REASON

_TRACEBACK: Final = "Traceback (most recent call last):"
_RANK: Final = re.compile(r"^\[rank\d+\]: ")
"""Prefix that torch puts before each line of a traceback inside a process group."""
_RAISED: Final = re.compile(r"(\w+\.)*[A-Z]\w*(:|$)")
"""An exception's line. Other last lines are no reason by themselves."""
_OUT_OF_MEMORY: Final = re.compile(
    r"OutOfMemoryError|MemoryError\b|CUDA out of memory|[Cc]an(no|')t allocate memory|CUBLAS_STATUS_ALLOC_FAILED"
)
"""Exceptions of torch on GPUs and CPUs, of Python and numpy, where an allocation failed."""
_MISSING_FILE: Final = re.compile(r"FileNotFoundError: \[Errno 2\] .*: '([^']*)'$")
_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-_])")
_CONTROL: Final = re.compile(r"[^\t\x20-\x7e\xa0-\U0010ffff]")


def classify(ended: Ended, kill: tuple[ExitKind, str] | None) -> Exit:
    """Return the kind of this exit, and its reason.

    kill: kind and reason if the agent sent a signal before: a script that catches SIGTERM and exits with 0 has not
    finished."""
    code, words = ended.exit_code, ended.last_words
    match code:
        case exit_codes.FINISHED if kill is None:
            return Exit(ExitKind.FINISHED, 0, "")
        case exit_codes.DRAINED:
            return Exit(ExitKind.DRAINED, code, "stopped at a step boundary, as requested")
        case exit_codes.PEER_LOST if kill is None or kill[0] is not ExitKind.FAILED:
            # A hung worker exits as one that lost a peer does, but lost none.
            return Exit(ExitKind.PEER_LOST, code, words or "a peer of its run was lost")
    if kill is not None:
        return Exit(kill[0], code, kill[1])
    if code < 0:
        killed = code == -signal.SIGKILL and ended.out_of_memory
        hint = ": the kernel ran out of memory meanwhile. Fewer workers on this node need less" if killed else ""
        return Exit(ExitKind.SIGNALLED, code, f"killed by {signal_name(-code)}{hint}", killed)
    if _RAISED.match(words):
        overflow = _OUT_OF_MEMORY.search(words) is not None
        return Exit(ExitKind.FAILED, code, f"{words}{_travel_hint(words)}"[:MAX_REASON], overflow)
    said = f"its last line: {words}"[: MAX_REASON // 2] if words else "without a word"
    return Exit(ExitKind.FAILED, code, f"exit code {code}, {said}")


def signal_name(number: int) -> str:
    """Return a signal's number and name: 'signal 9 (SIGKILL)'."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _travel_hint(words: str) -> str:
    missing = _MISSING_FILE.match(words)
    if missing is None or missing[1].startswith("/"):
        return ""
    return (
        ". Of what lies beside a script only *.py travels to the nodes; with --workdir FOLDER all in that folder does"
    )


def last_words(output: bytes) -> str:
    """Return the line that explains a worker's end: the end of its last traceback, else its last line.

    output: any bytes. The result is printable and has at most MAX_REASON characters."""
    lines = _printable_lines(output)
    starts = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    if starts:
        after = (line for line in lines[starts[-1] + 1 :] if line and not line.startswith((" ", "\t")))
        if raised := next(after, ""):
            return raised[:MAX_REASON]
    return next((line.strip()[:MAX_REASON] for line in reversed(lines) if line.strip()), "")


def last_lines(output: bytes, count: int) -> list[str]:
    """Return the last nonempty lines, printable."""
    return [line.strip() for line in _printable_lines(output) if line.strip()][-count:]


def _printable_lines(output: bytes) -> list[str]:
    text = _ESCAPES.sub("", output.decode("utf-8", errors="replace"))
    return [_RANK.sub("", _CONTROL.sub("", line), 1).rstrip() for line in text.splitlines()]
