"""The place of a worker: which stage of the model it holds, in which pipeline. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import BadInput


@dataclass(frozen=True, slots=True)
class StagePlace:
    """A pipeline's stages are neighbours in the order of ranks, so that activations stay on few machines."""

    rank: int
    stages: int
    pipelines: int

    @staticmethod
    def of(rank: int, world_size: int, stages: int) -> StagePlace:
        """Raises BadInput where the workers make up no whole pipelines."""
        if world_size % stages:
            raise BadInput(
                f"{world_size} workers make up no whole pipelines of {stages} stages. Give the job a multiple of "
                f"{stages} workers, or another number of stages"
            )
        return StagePlace(rank, stages, world_size // stages)

    @property
    def stage(self) -> int:
        return self.rank % self.stages

    @property
    def pipeline(self) -> int:
        return self.rank // self.stages

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks of this pipeline, by stage."""
        begin = self.pipeline * self.stages
        return tuple(range(begin, begin + self.stages))

    @property
    def replicas(self) -> tuple[int, ...]:
        """The ranks that hold this stage, by pipeline."""
        return tuple(range(self.stage, self.stages * self.pipelines, self.stages))
