"""Prepares a job's spec and code, and submits them from Python as `atoll submit` does from a shell."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from atoll.client import job_file
from atoll.client.client import Client
from atoll.client.job_file import JobFile
from atoll.errors import BadInput, NotFound
from atoll.jobs import code_bundle, job_spec
from atoll.jobs.code_bundle import Bundle
from atoll.network.rpc import Tls

if TYPE_CHECKING:
    from atoll.v1.common_pb2 import JobSpec

_COMMENT: Final = re.compile(r"(?:^|\s)#.*")


def submit(
    script: str | Path | None = None, *, controllers: Sequence[str] | None = None, tls: Tls | None = None, **fields: Any
) -> str:
    """Submit the script and the files beside it; return the job's id once the cluster will not lose it.

    fields: those of a job file, e.g. workers="2:8", args=["--lr", "0.1"], checkpoint={"every_steps": 500}; with
    module="package.train" no script. controllers, tls: by default from ATOLL_CONTROLLER and ATOLL_TLS_DIR, as for the
    command. Raises BadInput, NotFound, NotAllowed, ControllerUnreachable."""
    given = job_file.with_flags(JobFile(), {**fields, "script": str(script) if script is not None else None})
    spec, code = prepared(given, Path(), Path())
    with Client(controllers, tls=tls or Tls.of_environment()) as client:
        return client.submit(spec, code.data)


def prepared(job: JobFile, base: Path, root: Path) -> tuple[JobSpec, Bundle]:
    """Read the job's profile, requirements and code, and check its spec as the controller will, before any connection.

    base: the folder of a relative script; root: that of a relative workdir and profile. Raises BadInput, NotFound."""
    workdir = root / job.workdir if job.workdir else None
    beside = None
    if job.module and job.script:
        raise BadInput(f"script = {job.script!r} and module = {job.module!r}: a job has one of them. Leave one out")
    if job.module:
        beside = workdir or base
        script = module_file(job.module, beside)
    elif job.script:
        script = base / job.script
    else:
        raise BadInput("no script named. Give it: atoll submit train.py, or `script = ` in the job file")
    if missing := [name for name in job.secrets if not os.environ.get(name)]:
        raise BadInput(f"secret {missing[0]} is not set here. export {missing[0]}=… before you submit")
    job = job_file.with_profile(job, root)
    if isinstance(job.requirements, str):
        job = job_file.with_flags(job, {"requirements": read_requirements(root / job.requirements)})
    code = code_bundle.pack(script, workdir, beside)
    spec = job.to_spec(code.script, os.environ)
    spec.code_sha256 = code.sha256
    job_spec.from_wire(spec)
    return spec, code


def module_file(module: str, folder: Path) -> Path:
    """Return the file that `python -m module` runs in `folder`. Raises NotFound."""
    path = folder.joinpath(*module.split("."))
    for found in (path.with_name(f"{path.name}.py"), path / "__main__.py"):
        if found.is_file():
            return found
    raise NotFound(
        f"module {module} is not in {folder.resolve()}: there is neither {path}.py nor {path / '__main__.py'}. "
        "Name the folder that the first part lies in with --workdir"
    )


def read_requirements(path: Path) -> tuple[str, ...]:
    """Read the lines of a requirements file, without comments. Raises NotFound, BadInput."""
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise NotFound(f"requirements {path} are not there. Check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"requirements {path} cannot be read: {error}") from error
    lines = (_COMMENT.sub("", line).strip() for line in text.replace("\\\n", " ").splitlines())
    return tuple(line for line in lines if line)
