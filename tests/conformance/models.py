"""Model features of the conformance matrix: small models, their data, and what their scripts do beside the step.

Only torch is imported here, so that the reference and the workers train the same program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH: Final = 6
CLASSES: Final = 3
WORDS: Final = 40
MARKED_EVERY: Final = 5
"""Every fifth sample is marked: features use it to leave parts of a model unused in some batches and on some ranks."""

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""x_BW: float32 [batch, WIDTH]; y_BC: float32 [batch, CLASSES]; sample_B: int64 [batch], the samples' numbers."""


class Samples(torch.utils.data.Dataset[Batch]):
    """Targets are a fixed linear function of the inputs and some noise."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, WIDTH, generator=generator)
        way = torch.randn(WIDTH, CLASSES, generator=generator)
        self.y = self.x @ way + 0.1 * torch.randn(count, CLASSES, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        return self.x[index], self.y[index], torch.tensor(index)


class Stream(torch.utils.data.IterableDataset[Batch]):
    """The same samples, one after the other."""

    def __init__(self, count: int) -> None:
        self.samples = Samples(count)

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(len(self.samples)))


def words_of(x_BW: torch.Tensor) -> torch.Tensor:
    """Return one word number for each input, int64 [batch, WIDTH]; word 0 is padding."""
    return (7 * x_BW).long().abs() % WORDS


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.first(x)))


class Tied(nn.Module):
    """The last layer uses the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))[:, :CLASSES]


class Frozen(Mlp):
    """A layer that never trains stands between the two that do."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


class Reused(nn.Module):
    """One module is used twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


class SometimesUnused(Mlp):
    """A branch runs only where a slice holds a marked sample; another layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.never = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        return y + self.branch(x) * marked[:, None] if bool(marked.any()) else y


class Words(nn.Module):
    """An embedding, of whose rows a batch uses few."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=0, sparse=sparse)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(words_of(x)).mean(dim=1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(x.view(-1, WIDTH // 2, 2))
        return self.last(states[:, -1])


class ChannelsLast(nn.Module):
    """Weights of convolutions lie in memory with their channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, (3, 1))
        self.deeper = nn.Conv2d(4, 4, (1, 1))
        self.last = nn.Linear(4, CLASSES)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(-1, 2, 3, 1).contiguous(memory_format=torch.channels_last)
        return self.last(self.deeper(torch.tanh(self.conv(image))).flatten(1))


class OddLayouts(nn.Module):
    """A transposed parameter, a permuted one of three dimensions, a number without dimensions, and one entry."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(CLASSES, WIDTH).t())
        self.permuted = nn.Parameter((0.3 * torch.randn(3, WIDTH, 2)).permute(1, 2, 0))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x @ self.transposed + torch.tanh(torch.einsum("bw,wkc->bkc", x, self.permuted)).sum(dim=1)
        return self.scale * mixed + self.shift


class Buffers(Mlp):
    """Buffers of many dtypes, which the forward pass changes, and one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("f16", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("bf16", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("f64", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("u8", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("nothing", None)
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            for name in ("passes", "f16", "bf16", "f64", "u8", "passing"):
                getattr(self, name).add_(1)
            self.flags.logical_not_()
            self.phase.mul_(1j)
        return super().forward(x)  # type: ignore[no-any-return]


class Complex(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.ones(CLASSES, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.phases.abs()  # type: ignore[no-any-return]


class Lora(nn.Module):
    """A frozen base with trained low-rank differences."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Mlp().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, CLASSES, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Recomputed(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(lambda one: torch.tanh(self.first(one)), x, use_reentrant=False))


class Experts(nn.Module):
    """Inputs choose one of four experts; in small slices some have no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, :4].argmax(dim=1)
        y = x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]).to(y.dtype))
        return y


@dataclass
class Outputs:
    logits: torch.Tensor
    hidden: Mapping[str, list[torch.Tensor]]


class Structured(Mlp):
    """Takes keywords and returns a dataclass that holds a dict of lists, as models of transformers do."""

    def forward(self, *, inputs: torch.Tensor, flag: bool = True) -> Outputs:  # type: ignore[override]
        hidden = torch.tanh(self.first(input=inputs))
        return Outputs(self.last(hidden), {"states": [hidden, inputs]} if flag else {})


class MomentumEncoder(Mlp):
    """A slow copy of the first layer follows it inside the forward pass (He et al., MoCo, 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(WIDTH, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                    slow.lerp_(fast.to(slow.dtype), 0.1)
        return self.last(torch.tanh(self.first(x)) + 0.5 * torch.tanh(self.slow(x)))


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, 16))
        self.last = parametrizations.spectral_norm(nn.Linear(16, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def _normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))


def _synchronized() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.SyncBatchNorm(16), nn.Tanh(), nn.Linear(16, CLASSES))


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, CLASSES))


def forward(model: Any, batch: Batch) -> torch.Tensor:
    return model(batch[0])  # type: ignore[no-any-return]


def _forward_wide(model: Any, batch: Batch) -> torch.Tensor:
    return model(batch[0].double())  # type: ignore[no-any-return]


def _forward_marked(model: Any, batch: Batch) -> torch.Tensor:
    return model(batch[0], (batch[2] % MARKED_EVERY == 0).to(batch[0].dtype))  # type: ignore[no-any-return]


def _forward_structured(model: Any, batch: Batch) -> torch.Tensor:
    outputs = model(inputs=batch[0])
    return outputs.logits + 0.01 * sum(one.mean(dim=1, keepdim=True) for one in outputs.hidden["states"])  # type: ignore[no-any-return]


def _forward_twice(model: Any, batch: Batch) -> torch.Tensor:
    """The loss comes after a second forward pass, of other inputs."""
    first = model(batch[0])
    return first + 0.5 * model(batch[0].flip(1))  # type: ignore[no-any-return]


def _nothing(model: nn.Module, step: int) -> None:
    pass


def _freeze(model: nn.Module, step: int) -> None:
    if step >= 2:
        model.get_submodule("first").requires_grad_(False)


def _unfreeze(model: nn.Module, step: int) -> None:
    """Train the first layer from the fourth update on. It required gradients when the model was prepared."""
    for parameter in model.get_submodule("first").parameters():
        parameter.requires_grad_(step >= 3)


def _clamp(model: nn.Module, step: int) -> None:
    """Write a weight between two steps, as a Wasserstein critic does."""
    with torch.no_grad():
        model.get_parameter("first.weight").clamp_(-0.25, 0.25)


@dataclass(frozen=True, slots=True)
class Feature:
    build: Callable[[], nn.Module]
    forward: Callable[[Any, Batch], torch.Tensor] = forward
    before_step: Callable[[nn.Module, int], None] = _nothing
    """Called with the model and the number of the update that comes, before its batch is used."""
    after_update: Callable[[nn.Module, int], None] = _nothing
    average: bool = False
    """The script keeps an exponential average of the weights in a copy of the prepared model."""
    by_slices: bool = False
    """What a rank computes depends on its slice as a whole (batch statistics), so the reference takes slices too."""
    random: bool = False
    sparse: bool = False
    unused: bool = False
    """Parameters that some slices do not use have no gradient there."""
    idle_blocks: bool = False
    """Whole parameters, or rows of them, have no gradient in some steps."""
    whole_graph: bool = True
    """torch.compile traces the forward pass with `fullgraph=True`."""
    forward_writes: bool = False
    """The forward pass writes parameters or persistent buffers."""

    writes: bool = False
    """The script, or the forward pass, writes what it computes from the weights of the moment."""

    @property
    def needs_loop(self) -> bool:
        """Whether it is made of what a script does between two steps."""
        return self.before_step is not _nothing or self.after_update is not _nothing or self.average


FEATURES: Final[Mapping[str, Feature]] = {
    "mlp": Feature(Mlp),
    "tied": Feature(Tied),
    "frozen": Feature(Frozen),
    "frozen-mid-run": Feature(Mlp, before_step=_freeze),
    "unfrozen-mid-run": Feature(Mlp, before_step=_unfreeze, idle_blocks=True),
    "reused": Feature(Reused),
    "sometimes-unused": Feature(
        SometimesUnused, forward=_forward_marked, unused=True, idle_blocks=True, whole_graph=False
    ),
    "embedding": Feature(lambda: Words(sparse=False), idle_blocks=True),
    "embedding-sparse": Feature(lambda: Words(sparse=True), idle_blocks=True, sparse=True, whole_graph=False),
    "batch-norm": Feature(_normalized, by_slices=True),
    "sync-batch-norm": Feature(_synchronized),
    "lstm": Feature(Lstm, whole_graph=False),
    "dropout": Feature(_dropping, random=True),
    "channels-last": Feature(ChannelsLast),
    "odd-layouts": Feature(OddLayouts),
    "buffers": Feature(Buffers, forward_writes=True),
    "complex": Feature(Complex),
    "float64": Feature(lambda: Mlp().double(), forward=_forward_wide),
    "ema": Feature(Mlp, average=True, writes=True),
    "lora": Feature(Lora),
    "recomputed": Feature(Recomputed),
    "experts": Feature(Experts, unused=True, idle_blocks=True, whole_graph=False),
    "structured": Feature(Structured, forward=_forward_structured),
    "two-passes": Feature(Mlp, forward=_forward_twice),
    "clamped": Feature(Mlp, after_update=_clamp, writes=True),
    "momentum-encoder": Feature(MomentumEncoder, forward_writes=True, writes=True),
    "parametrized": Feature(Parametrized, forward_writes=True),
}
