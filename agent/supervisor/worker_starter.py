"""Start a worker's process: by a fork server with the same interpreter if there is one, else by a new interpreter."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atoll.agent.runtime.api.warm_start import LaunchOrder
from atoll.agent.supervisor.environments.building import activated, interpreter
from atoll.agent.supervisor.fork_servers import ForkServers
from atoll.agent.supervisor.preparation import Prepared
from atoll.agent.supervisor.processes import on_numa_node
from atoll.agent.supervisor.processes.environment import Interpreter, can_wait, launch_variables, worker_environment
from atoll.agent.supervisor.processes.process import WorkerProcess, executed
from atoll.agent.supervisor.settings import AgentSettings
from atoll.agent.telemetry.devices import Device
from atoll.agent.telemetry.numa import bindings, read_nodes
from atoll.host.routes import interface_of
from atoll.jobs.worker_key import WorkerKey
from atoll.v1.agents_pb2 import Launch


class WorkerStarter:
    """Starter of workers, on the event loop. Close `fork_servers` when no worker is started any more."""

    def __init__(self, settings: AgentSettings, devices: Sequence[Device], pids: Path, agent_socket: str) -> None:
        """pids: the folder of pid files. agent_socket: the address to which workers connect."""
        self._settings = settings
        self._devices = {device.index: device for device in devices}
        self._bindings = bindings(read_nodes(), devices)
        self._pids = pids
        self._agent_socket = agent_socket
        self.fork_servers = ForkServers(pids)

    def wait_for_launches(self, address: str) -> None:
        """Prepare fork servers for jobs without own variables. address: this node's, whose interface workers use."""
        place = {device: rank for rank, device in enumerate(self._devices)}
        idle = {device: self._interpreter(device, place[device], {}, address=address) for device in self._devices}
        self.fork_servers.open(idle, time.monotonic())

    def start(
        self, key: WorkerKey, launch: Launch, prepared: Prepared, *, address: str, on_exit: Callable[[], None]
    ) -> WorkerProcess:
        """Raises AtollError, OSError, ValueError if the process cannot be made."""
        own = {**launch.spec.env, **launch.spec.secrets}
        wanted = self._interpreter(
            launch.device, launch.local_rank, own, address=address, job=key.job, environment=prepared.environment
        )
        secret = secrets.token_hex(16)
        argv = (launch.spec.script, *launch.spec.args)
        device = self._devices[launch.device]
        variables = launch_variables(launch, device, agent_socket=self._agent_socket, secret=secret)
        paths = [str(prepared.code), *filter(None, [wanted.env.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
        order = LaunchOrder(argv, str(prepared.code), variables, launch.spec.module)
        pid_file = self._pids / f"{key.job}.{key.run}.{key.rank}.pid"
        waits = wanted if can_wait(wanted.env, own) else None
        return self.fork_servers.start(
            launch.device, waits, key, order, secret=secret, pid_file=pid_file, on_exit=on_exit
        ) or WorkerProcess(
            executed([*wanted.command, *order.arguments], folder=prepared.code, env={**wanted.env, **variables}),
            secret=secret,
            pid_file=pid_file,
            on_exit=on_exit,
        )

    def _interpreter(
        self,
        device: int,
        local_rank: int,
        own: Mapping[str, str],
        *,
        address: str,
        job: str = "",
        environment: Path | None = None,
    ) -> Interpreter:
        bound = self._bindings.get(device)
        command = [sys.executable if environment is None else str(interpreter(environment))]
        if bound is not None:
            command = on_numa_node.command(command, bound.node, bound.cpus)
        env = worker_environment(
            os.environ,
            own,
            self._devices[device],
            list(self._devices.values()),
            local_rank=local_rank,
            interface=interface_of(address),
            threads=self._settings.threads,
            binding=bound,
        )
        if environment is not None:
            env = activated(environment, env)
        return Interpreter(tuple(command), env, job if own or environment is not None else "")
