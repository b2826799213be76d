"""Worker processes in namespaces of their own, which are asked, and answer, in lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from atoll.errors import BadInput, DeadlineExceeded
from lab.network import Network


class AskedWorkers:
    """One process for each namespace of a network, all gone when the `with` block ends. Each is given `asked(rank)` as
    its argument and says a line when it is ready; `begun` answers those."""

    def __init__(self, network: Network, script: Path, deadline_s: float) -> None:
        """deadline_s: for any answer."""
        self.network = network
        self._script, self._deadline_s = script, deadline_s
        self._processes: list[subprocess.Popen[str]] = []
        self._pool = ThreadPoolExecutor(network.workers)

    def asked(self, rank: int) -> Mapping[str, Any]:
        raise NotImplementedError

    def environment(self, rank: int) -> Mapping[str, str]:
        """Beside this process's own."""
        return {}

    def begun(self, said: list[Any]) -> None:
        """The first line of each came."""

    def __enter__(self) -> Self:
        try:
            for rank in range(self.network.workers):
                env = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment(rank)}
                asked = json.dumps({**self.asked(rank), "parent": os.getpid()})
                argv, pipe = self.network.inside(rank, [sys.executable, str(self._script), asked]), subprocess.PIPE
                self._processes.append(subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=env))
            self.begun(self.answers())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(self._deadline_s)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._pool.shutdown()

    def ask(self, what: Any) -> None:
        """The same of all."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()

    def answers(self) -> list[Any]:
        """A line of each. Raises DeadlineExceeded, BadInput where one has ended."""

        def line(process: subprocess.Popen[str]) -> str:
            assert process.stdout is not None
            return process.stdout.readline()

        waiting = [self._pool.submit(line, process) for process in self._processes]
        try:
            said = [one.result(self._deadline_s) for one in waiting]
        except TimeoutError as error:
            self.close()
            raise DeadlineExceeded(f"a worker said nothing for {self._deadline_s:g} s") from error
        if not all(said):
            raise BadInput(f"worker {said.index('')} ended; what it said stands above")
        return [json.loads(one) for one in said]
