"""A cluster that tests use one after the other: most of what a short one costs is to start its processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cluster import ENDED, Cluster, wait_until
from shared_processes import PIDS


class SharedCluster:
    """One controller and an agent for each speed. A test may kill what it likes, if it is whole again in the end; if it
    is not, the next test gets a new one."""

    def __init__(self, new_folder: Callable[[], Path], speeds: Sequence[float]) -> None:
        self._new_folder, self._speeds = new_folder, speeds
        self._cluster: Cluster | None = None

    def whole(self) -> Cluster:
        """Return the cluster without jobs, all its processes alive and connected."""
        if self._cluster is not None and not self._is_whole(self._cluster):
            self.close()
        if self._cluster is None:
            self._cluster = Cluster(self._new_folder())
            self._cluster.local(self._speeds)
        return self._cluster

    def after_test(self) -> None:
        """End what the test left, and show the logs, which pytest prints where it failed."""
        if (cluster := self._cluster) is None:
            return
        PIDS.update(process.pid for process in cluster.processes.values())
        cluster.print_logs()
        try:
            if cluster.processes["controller"].poll() is None:
                self._end_jobs(cluster)
        finally:
            cluster.close_client()

    def close(self) -> None:
        if self._cluster is not None:
            PIDS.difference_update(process.pid for process in self._cluster.processes.values())
            self._cluster.__exit__(None, None, None)
            self._cluster = None

    def _is_whole(self, cluster: Cluster) -> bool:
        alive = all(process.poll() is None for process in cluster.processes.values())
        return alive and [node.connected for node in cluster.client.nodes().nodes] == [True] * len(self._speeds)

    @staticmethod
    def _end_jobs(cluster: Cluster) -> None:
        left = [job.id for job in cluster.client.jobs() if job.phase not in ENDED]
        for job in left:
            cluster.client.cancel(job)
        wait_until("the test's jobs end", lambda: all(cluster.job(job).phase in ENDED for job in left), 60)
