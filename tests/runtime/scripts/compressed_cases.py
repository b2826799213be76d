"""Strategy compressed by every algorithm: ranks end with the same bits, and nothing of a gradient is lost.

Started with a port for each run. Batches of 7 and a last of 1 make unequal parts."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from several_runs import check_all_ranks_have, opened
from torch import nn

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.strategies.compressed.settings import Compressed
from atoll.strategies.compressed.state import CompressedState
from atoll.strategies.declaration import StrategySettings

SAMPLES, BATCH, EPOCHS = 29, 7, 2
RANKS: Final = WorkerPlace.from_environment().world_size
CASES: Final[tuple[dict[str, Any], ...]] = (
    {"algorithm": "float16"},
    {"algorithm": "int8"},
    {"algorithm": "int4"},
    {"algorithm": "random-k", "density": 0.3},
    {"algorithm": "dgc", "density": 0.2},
    {"algorithm": "ef-sign"},
    {"algorithm": "one-bit"},
    {"algorithm": "threshold", "threshold": 0.02},
    {"algorithm": "power", "rank": 2},
)


def built(momentum: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(30, 70), nn.Tanh(), nn.Linear(70, 40), nn.Tanh(), nn.Linear(40, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 30, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    )


def train(strategy: str | StrategySettings, accumulate: int = 1, momentum: float = 0.0) -> dict[str, torch.Tensor]:
    """The weights that all ranks end with."""
    with opened(strategy) as run:
        model, optimizer = built(momentum)
        model, optimizer, loader = run.prepare(model, optimizer, data(), batch_size=BATCH, shuffle=False)
        for _ in run.epochs(EPOCHS):
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets) / accumulate
                run.backward(loss)
                if (run.step + 1) % accumulate == 0 or run.last_batch:
                    optimizer.step()
                    optimizer.zero_grad()
        trained = {name: one.detach().clone() for name, one in model.named_parameters()}
        check_all_ranks_have(run, trained)
    return trained


def check_momentum_where_nothing_is_compressed() -> None:
    """It is the optimizer's: of gradients that no plan compresses, and of one worker alone, also where passes add up;
    clipping is each tensor's own there too."""
    own = {"algorithm": "dgc", "momentum": 0.9, "min_bytes": 1 << 40}
    for accumulate in (1, 3) if RANKS == 1 else (1,):  # of several workers each pass's gradient counts by itself
        expected, weights = train("dense", accumulate, momentum=0.9), train(Compressed(**own), accumulate)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
    clipped = train(Compressed(**own, clip_norm=1e-6))
    begun = dict(built()[0].named_parameters())
    for name, one in clipped.items():
        torch.testing.assert_close(one, begun[name].detach(), rtol=0.0, atol=1e-4)


def check_scaled_losses() -> None:
    """A GradScaler's factor grows in each second step, and falls where a loss is infinite: weights, what is left out
    and momentum are those of losses that nobody scales, by what is above a threshold and by clipping, compressed or
    not. What is kept has no factor: a run with another one goes on with it."""
    cases: list[dict[str, Any]] = [{"algorithm": "threshold", "threshold": 0.02}]
    for min_bytes in (0, 1 << 40):
        cases += [{"algorithm": "dgc", "density": 0.2, "momentum": 0.5, "clip_norm": 0.05, "min_bytes": min_bytes}]
    for case in cases:
        ended = []
        for scaled in (False, True):
            with opened(Compressed(**{"min_bytes": 0, **case})) as run:
                model, optimizer = built()
                model, optimizer, loader = run.prepare(model, optimizer, data(), batch_size=BATCH, shuffle=False)
                scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2, enabled=scaled)
                for _ in run.epochs(2):
                    for inputs, targets in loader:
                        loss = nn.functional.mse_loss(model(inputs), targets)
                        if run.step == 4:
                            loss = loss * float("inf")
                        run.backward(scaler.scale(loss))
                        if scaled or run.step != 4:
                            scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()
                assert run._training is not None
                kept = run._training._current.driver.durable.own_at_boundary()
                ended.append({**kept, **{name: one.detach().clone() for name, one in model.named_parameters()}})
                assert scaler.get_scale() == (2.0**15 if scaled else 1.0)
        torch.testing.assert_close(ended[1], ended[0], rtol=1e-5, atol=1e-7, msg=lambda text, it=case: f"{it}: {text}")


class Branched(nn.Module):
    """Of a layer that a batch leaves out, no rank has a gradient then; of the last one none ever has."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(50, 40) for _ in range(3))
        for layer in (self.always, self.sometimes, self.never):
            nn.init.zeros_(layer.weight)

    def forward(self, given: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.always(given) + self.sometimes(2 * given) if both else self.always(given)


def all_gradients(strategy: str | StrategySettings) -> dict[str, torch.Tensor]:
    """What was sent, and what is left out, of all ranks and steps."""
    with opened(strategy) as run:
        model = Branched()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        inputs = torch.randn(24, 50, generator=torch.Generator().manual_seed(5))
        dataset = torch.utils.data.TensorDataset(inputs)
        model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=8, shuffle=False)
        begun = {name: one.detach().clone() for name, one in model.named_parameters()}
        for _ in run.epochs(2):
            for (given,) in loader:
                outputs = model(given, both=run.step % 3 == 0)
                run.backward((outputs * torch.linspace(-1, 1, 40)).sum(dim=1).mean())
                assert model.never.weight.grad is None
                optimizer.step()
                optimizer.zero_grad()
        moved = {name: begun[name] - one.detach() for name, one in model.named_parameters()}
        check_all_ranks_have(run, moved)
        assert run._training is not None
        durable = run._training._current.driver.durable
        if isinstance(durable, CompressedState):
            group, left = run._session.group, durable._residuals.by_name()
            assert group is not None
            of_all = {name: torch.tensor(group.sum_numbers(one.tolist())) for name, one in left.items()}
            assert any(one.any() for one in of_all.values()), "nothing was left out: it did not compress"
            moved = {name: one + of_all[name].view(one.shape) for name, one in moved.items()}
    return moved


def check_linear_model_keeps_every_gradient() -> None:
    """A gradient that does not depend on the weights: the sum of all that was sent and of all that is left out is what
    dense sends. So it is of a layer that only some batches use: what arrives in others counts."""
    expected = all_gradients("dense")
    for settings in CASES:
        actual = all_gradients(Compressed(**settings, min_bytes=0))
        torch.testing.assert_close(
            actual, expected, rtol=1e-3, atol=1e-4, msg=lambda text, it=settings: f"{it}: {text}"
        )


check_momentum_where_nothing_is_compressed()
if RANKS > 1:
    check_linear_model_keeps_every_gradient()
    check_scaled_losses()
    train(Compressed(algorithm="dgc", density=0.2, momentum=0.5, clip_norm=5.0, warmup_steps=6, min_bytes=0))
print(f"{len(CASES)} cases on {RANKS} ranks", file=sys.stderr)
