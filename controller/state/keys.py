"""Keys of etcd. Numbers are padded, so that the order of keys is the order of numbers."""

from __future__ import annotations

import re
from typing import Final

from atoll.errors import BadInput

LEADER: Final = "/atoll/leader"
JOBS: Final = "/atoll/jobs/"
NODES: Final = "/atoll/nodes/"
CODES: Final = "/atoll/code/"
CLUSTER: Final = "_cluster"  # stands in for a job's id in the keys of events that belong to no job

# One path segment: no "/", so that no name reaches into another's keys.
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@-]{0,252}")


def _segment(kind: str, text: str) -> str:
    if not _SEGMENT.fullmatch(text):
        shown = text if len(text) <= 80 else text[:80] + "…"
        raise BadInput(
            f"{kind} {shown!r} cannot be part of a key. Use 1 to 253 of A-Z a-z 0-9 . _ : @ -, no . or - first"
        )
    return text


def _number(kind: str, number: int, digits: int) -> str:
    if not 0 <= number < 10**digits:
        raise BadInput(f"{kind} {number} does not fit the {digits} digits it has in a key")
    return f"{number:0{digits}d}"


def job(job_id: str) -> str:
    return f"{JOBS}{_segment('job id', job_id)}"


def run(job_id: str, run_number: int) -> str:
    return f"{runs_prefix(job_id)}{_number('run', run_number, 6)}"


def runs_prefix(job_id: str) -> str:
    return f"/atoll/runs/{_segment('job id', job_id)}/"


def plan(job_id: str, run_number: int, plan_number: int) -> str:
    return f"{plans_prefix(job_id, run_number)}{_number('plan', plan_number, 6)}"


def plans_prefix(job_id: str, run_number: int | None = None) -> str:
    """Plans of one run, or of all runs of a job."""
    prefix = f"/atoll/plans/{_segment('job id', job_id)}/"
    return prefix if run_number is None else f"{prefix}{_number('run', run_number, 6)}/"


def placement(job_id: str, run_number: int) -> str:
    return f"{placements_prefix(job_id)}{_number('run', run_number, 6)}"


def placements_prefix(job_id: str) -> str:
    return f"/atoll/placements/{_segment('job id', job_id)}/"


def view(job_id: str, run_number: int, view_number: int) -> str:
    return f"{views_prefix(job_id, run_number)}{_number('view', view_number, 6)}"


def views_prefix(job_id: str, run_number: int | None = None) -> str:
    """Views of one run, or of all runs of a job."""
    prefix = f"/atoll/views/{_segment('job id', job_id)}/"
    return prefix if run_number is None else f"{prefix}{_number('run', run_number, 6)}/"


def commit(job_id: str) -> str:
    return f"/atoll/commits/{_segment('job id', job_id)}"


def admission(job_id: str, number: int) -> str:
    return f"{admissions_prefix(job_id)}{_number('admission', number, 6)}"


def admissions_prefix(job_id: str) -> str:
    return f"/atoll/admissions/{_segment('job id', job_id)}/"


def node(name: str) -> str:
    return f"{NODES}{_segment('node name', name)}"


def event(job_id: str, sequence: int) -> str:
    return f"{events_prefix(job_id)}{_number('event', sequence, 8)}"


def events_prefix(job_id: str) -> str:
    """Events of one job; `CLUSTER` for those of no job."""
    return f"/atoll/events/{_segment('job id', job_id)}/"


def code(sha256: str, chunk: int) -> str:
    return f"{code_prefix(sha256)}{_number('chunk', chunk, 4)}"


def code_prefix(sha256: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise BadInput(f"code hash {sha256[:80]!r} is not a SHA-256 in lower-case hexadecimal")
    return f"{CODES}{sha256}/"


def sha256_of_code(key: str) -> str:
    """Return the digest in a key under `CODES`."""
    return key.removeprefix(CODES).partition("/")[0]


def request(request_id: str) -> str:
    return f"/atoll/requests/{_segment('request id', request_id)}"


def last_segment(key: str) -> str:
    """Return the name or number at the end of a key."""
    return key.rpartition("/")[2]
