"""Settings of strategy `stale-sparse`."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from atoll.strategies.declaration import StrategySettings

MAX_SPARSITY: Final = 0.9999
AS_PUBLISHED: Final = {"sparsity": 0.99, "values": "float16"}
"""Defaults of settings that are left out with `exchange = "gradients"`."""
Sparsity: TypeAlias = Annotated[float, Field(ge=0, le=MAX_SPARSITY)]


class StaleSparse(StrategySettings):
    """Only the heaviest blocks of gradients travel, and a forward pass waits for the update before the last at most.

    Source: StellaTrain, SIGCOMM 2024, section 3. Raises SettingError when made."""

    sparsity: Sparsity = 0.8
    """Leave this share of the entries out of a step, 0 to 0.9999. The default with exchange `gradients` is 0.99."""

    staleness: Annotated[int, Field(ge=0, le=1)] = 1
    """Let a forward pass wait for the round before it (0), or for the one before that (1)."""

    exchange: Literal["updates", "gradients"] = "updates"
    """Exchange `updates` of each rank's own optimizer, which may be any and sees its own gradients at once; or
    `gradients`, as published, with sparse optimizers of the SGD and Adam families on the sums."""

    selection: Literal["threshold", "topk", "random"] = "threshold"
    """Choose blocks by a `threshold` that adapts, exactly (`topk`), or at `random`, the same on all ranks."""

    values: Literal["float16", "bfloat16", "float32", "int8", "int4", "int2"] = "int2"
    """Round the chosen values on the wire to this type. `int8` and `int4` have a scale for each 16 values. `int2` is a
    sign and one of two magnitudes. What rounding takes away stays in the residual. The default with exchange
    `gradients` is `float16`."""

    digest_every: Annotated[int, Field(ge=1, lt=2**32)] = 100
    """Compare the weights of all workers every N rounds."""

    momentum: Literal["lazy", "as-is"] = "lazy"
    """Decay the moments of a block for the steps that did not touch it (`lazy`), or leave them alone (`as-is`), with
    exchange `gradients`."""

    error_feedback: bool = True
    """Add what was not sent to the next step's gradient, with exchange `gradients`."""

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
