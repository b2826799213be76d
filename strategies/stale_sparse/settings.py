"""StrategySettings of strategy `stale-sparse`."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from atoll.strategies.declaration import Flag, StrategySettings

MAX_SPARSITY: Final = 0.9999
AS_PUBLISHED: Final = {"sparsity": 0.99, "values": "float16"}
"""Defaults of settings that are left out with `exchange = "gradients"`."""
Sparsity: TypeAlias = Annotated[float, Field(ge=0, le=MAX_SPARSITY)]


class StaleSparse(StrategySettings):
    """Only the heaviest blocks of gradients travel, and a forward pass waits for the update before the last at most.

    Source: StellaTrain, SIGCOMM 2024, section 3. Raises SettingError when made."""

    sparsity: Annotated[Sparsity, Flag("SHARE", "of each gradient left out of a step, e.g. 0.9")] = 0.8
    """share of the entries a step leaves behind, 0 to 0.9999; `atoll adjust JOB --sparsity S` changes it on the run, on
    all workers from the same step; left out with `exchange = "gradients"`, 0.99"""

    staleness: Annotated[int, Field(ge=0, le=1)] = 1
    """0: a forward pass waits for the round before it; 1: for the one before that"""

    exchange: Literal["updates", "gradients"] = "updates"
    """`updates`: of each rank's own optimizer, so that it sees its own gradients at once; any optimizer. `gradients`:
    the method as published, with sparse optimizers on the sums; SGD and Adam families"""

    selection: Literal["threshold", "topk", "random"] = "threshold"
    """how blocks are chosen: by a threshold that adapts, exactly (`topk`), or at random (the same on all ranks)"""

    values: Literal["float16", "bfloat16", "float32", "int8", "int4", "int2"] = "int2"
    """rounding of the chosen values on the wire: `int8` and `int4` with a scale for each 16, `int2` is a sign
    and one of two magnitudes; what rounding takes away stays in the residual; left out with
    `exchange = "gradients"`, `float16`"""

    digest_every: Annotated[int, Field(ge=1, lt=2**32)] = 100
    """rounds between comparisons of all workers' weights"""

    momentum: Literal["lazy", "as-is"] = "lazy"
    """moments with `exchange = "gradients"`: `lazy` decays those of a block for the steps in which it was not touched,
    `as-is` leaves them alone"""

    error_feedback: bool = True
    """with `exchange = "gradients"`: whether what was not sent is added to the next step's gradient"""

    @model_validator(mode="before")
    @classmethod
    def _gradients_as_published(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("exchange") != "gradients":
            return values
        return AS_PUBLISHED | values

    @field_validator("error_feedback")
    @classmethod
    def _error_feedback_fits(cls, value: bool, fields: ValidationInfo) -> bool:
        if not value and fields.data.get("exchange") == "updates":
            raise ValueError(
                'has no meaning with exchange = "updates", where it is in the weights themselves; '
                'with exchange = "gradients" it may be turned off'
            )
        return value
