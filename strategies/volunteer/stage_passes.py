"""Computes tasks of a stage: the same on a server and on a volunteer, which both run the job's script."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from atoll.agent.runtime.api.engine_inputs import pair_of
from atoll.agent.runtime.checkpoints.disk.tensorfile import digest_of
from atoll.agent.runtime.data.orders import Generators
from atoll.agent.runtime.pipeline.schedule import Direction
from atoll.agent.runtime.pipeline.script_autocast import ScriptAutocast
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.step.backward.batch_statistics import batch_statistics_layers
from atoll.agent.runtime.step.state.randomness import seed_step
from atoll.agent.runtime.strategy_interface.capabilities import EngineParts
from atoll.agent.runtime.strategy_interface.script_checks import Script
from atoll.errors import BadInput
from atoll.strategies.declaration import StrategySettings

UNREACHED: Final = -0.0
"""The gradient of a parameter that a pass did not reach. Sums keep it: -0.0 + -0.0 is -0.0, and -0.0 + x is x. No
gradient is -0.0 itself. A link of `int8` makes it 0.0, which is a gradient."""
FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class StagePass:
    """Computation of a stage's task. draws: seed of its random numbers, the same wherever it is computed and in both
    directions, so that answers can be compared and activations computed again. bfloat16: whether the rank's
    script calls its step under torch.autocast."""

    direction: Direction
    step: int
    micro: int
    begin: int
    end: int
    draws: int
    made_here: bool = False
    bfloat16: bool = False

    @property
    def samples(self) -> int:
        return self.end - self.begin


def check_script(settings: StrategySettings, script: Script) -> None:
    """Raise BadInput for a model that `check_stage` refuses."""
    check_stage(script.model, script.device)


def check_stage(stage: nn.Module, device: torch.device) -> None:
    """Raise BadInput for a model whose gradient is not a sum over samples, or that float32 does not hold."""
    if layers := batch_statistics_layers(stage):
        raise BadInput(
            f"strategy volunteer adds up gradients that are computed apart, and {type(layers[0]).__name__} needs "
            "all of a batch together. Use GroupNorm or LayerNorm, or freeze it with eval()"
        )
    if device.type == "cuda" and any(_drops_out_in_cudnn(one) for one in stage.modules()):
        raise BadInput(
            "strategy volunteer computes passes again with the same random numbers, and cuDNN's dropout between "
            "the layers of an RNN takes them from a state of its own. Use dropout=0 there, and nn.Dropout around it"
        )
    for one in stage.parameters():
        if one.requires_grad and one.dtype not in FLOATS:
            raise BadInput(f"strategy volunteer sends weights as float32, and a parameter is {one.dtype}")


class StagePasses:
    """Passes of one worker, on one stage; a whole model is first and last stage. Vectors of weights and gradients
    are float32 on the CPU, with P entries: one for each that trains, in the model's order.

    What a pass is given and gives (N samples; I, O: shapes of a sample's input and output; i: numbers of samples):

        forward, first stage     i [N]               -> outputs [N, *O]
        forward, later ones      inputs [N, *I]      -> outputs [N, *O]
        backward, first stage    i, gradient of the outputs        -> gradient [P]
        backward, later ones     inputs, gradient of the outputs   -> gradient [P], gradient of the inputs [N, *I]
        backward, last stage     inputs, i           -> gradient [P], loss [1], gradient of the inputs
        backward, whole model    i                   -> gradient [P], loss [1]

    Gradients and the loss are summed over the samples. The gradient of a parameter that a pass did not reach is
    UNREACHED: a parameter that no sample reached has none, as in plain torch. In a backward pass that was made here the
    first of what is given is left out. Raises BadInput for a model whose gradient is not a sum over samples, whose
    forward pass writes its state, or that float32 does not hold."""

    def __init__(self, session: Session, stage: nn.Module, parts: EngineParts, *, first: bool, last: bool) -> None:
        self._session, self._stage, self._parts = session, stage, parts
        self.first, self.last = first, last
        self.parameters = [one for one in stage.parameters() if one.requires_grad]
        self._sizes = [one.numel() for one in self.parameters]
        self.size = sum(self._sizes)
        """P."""
        self._made: dict[tuple[int, int, int], tuple[Any, torch.Tensor]] = {}  # inputs and outputs that wait
        self._of: tuple[int, int] | None = None  # step and attempt that these are of
        self.drew = False
        """Whether the last pass drew random numbers (dropout) from the device's generator."""
        check_stage(stage, session.device)

    def weights(self) -> torch.Tensor:
        """[P]."""
        return torch.cat([one.detach().reshape(-1).float().cpu() for one in self.parameters])

    @torch.no_grad()
    def load(self, weights_P: torch.Tensor) -> None:
        """Raises BadInput for those of another model."""
        if weights_P.dtype != torch.float32 or weights_P.shape != (self.size,):
            raise BadInput(
                f"the server's weights are {weights_P.dtype} {tuple(weights_P.shape)}, this model's float32 "
                f"({self.size},). The script has to make the same model wherever it runs"
            )
        for one, piece in zip(self.parameters, torch.split(weights_P, self._sizes), strict=True):
            one.copy_(piece.reshape(one.shape))

    def without_frozen(self, gradient_P: torch.Tensor) -> torch.Tensor:
        """Return a volunteer's gradient without that of parameters which the script here has frozen since: there the
        script does not run on."""
        for one, piece_N in zip(self.parameters, torch.split(gradient_P, self._sizes), strict=True):
            if not one.requires_grad:
                piece_N.fill_(UNREACHED)
        return gradient_P

    def begin(self, step: int, attempt: int) -> None:
        """Activations of other ones are needed no more."""
        if self._of != (step, attempt):
            self._of = (step, attempt)
            self._made.clear()

    def compute(self, asked: StagePass, given: Sequence[torch.Tensor], *, keep: bool = False) -> list[torch.Tensor]:
        """The answer, on the CPU. keep: of a forward pass, what its backward pass needs, until that or `begin`. p.grad
        is used, and left to be overwritten."""
        self._session.throttle.resume()
        seed_step(self._session.seed, asked.draws, asked.step)
        self.drew = False
        torch.clear_autocast_cache()  # a kept forward pass may be of other weights than what is computed again
        forward = asked.direction is Direction.FORWARD
        answer = self._forward(asked, given, keep=keep) if forward else self._backward(asked, given)
        answer = [one.detach().cpu() for one in answer]
        self._session.throttle.pay()
        return answer

    def example(self, given: torch.Tensor, step: int, *, bfloat16: bool) -> torch.Tensor:
        """A forward pass of one sample, for the shape of what it gives: [1, *O]."""
        asked = StagePass(Direction.FORWARD, step, 0, 0, 1, draws=0, bfloat16=bfloat16)
        return self.compute(asked, [given])[0]

    @torch.no_grad()
    def set_gradient(self, mean_P: torch.Tensor) -> None:
        """Write it to p.grad; None for a parameter that no sample reached."""
        for one, piece_N in zip(self.parameters, torch.split(mean_P, self._sizes), strict=True):
            one.grad = None if _unreached(piece_N) else torch.empty_like(one).copy_(piece_N.view(one.shape))

    def _forward(self, asked: StagePass, given: Sequence[torch.Tensor], *, keep: bool) -> list[torch.Tensor]:
        with torch.set_grad_enabled(keep):
            inputs = self._inputs(asked, given[0])
            with self._region(asked):
                outputs = self._passed(asked, inputs)
        if keep:
            self._made[asked.micro, asked.begin, asked.end] = inputs, outputs
        return [outputs]

    def _backward(self, asked: StagePass, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        kept = self._made.pop((asked.micro, asked.begin, asked.end), None) if asked.made_here else None
        if kept is None and len(given) < 2 - (self.first and self.last):
            raise BadInput("a task is of activations that were not made here, and comes without their inputs")
        for parameter in self.parameters:
            parameter.grad = None
        loss: list[torch.Tensor] = []
        if self.last:
            fetched, targets = self._fetched(asked, given[-1])
            inputs = fetched if self.first else self._inputs(asked, given[0])
            with self._region(asked):
                loss = [self._loss(asked, self._passed(asked, inputs), targets)]
            torch.autograd.backward(loss)
        else:
            if kept is None:
                inputs = self._inputs(asked, given[0])
                with self._region(asked):
                    kept = inputs, self._passed(asked, inputs)
            inputs, outputs = kept
            if outputs.requires_grad:
                torch.autograd.backward(outputs, given[-1].to(outputs))
        answer = [torch.cat([_vector(one) for one in self.parameters]), *(one.reshape(1).float() for one in loss)]
        if not self.first:
            answer.append(inputs.grad if inputs.grad is not None else torch.zeros_like(inputs))
        return answer

    def _inputs(self, asked: StagePass, given: torch.Tensor) -> Any:
        """Return the inputs on the device: samples by number, or the previous stage's outputs."""
        if self.first:
            return self._fetched(asked, given)[0]
        return given.to(self._session.device, copy=True).requires_grad_(torch.is_grad_enabled())

    @contextmanager
    def _region(self, asked: StagePass) -> Iterator[None]:
        """Run a forward pass, and its loss, as the rank's script would. Sets `drew`."""
        before = self._generator_state()
        with ScriptAutocast(self._session.device.type, asked.bfloat16).forward():
            yield
        self.drew = not torch.equal(before, self._generator_state())

    def _generator_state(self) -> torch.Tensor:
        """Return that of the device: every random operation on it moves it, whoever calls it."""
        device = self._session.device
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def _passed(self, asked: StagePass, inputs: Any) -> torch.Tensor:
        """Return the outputs. Raises BadInput where the pass wrote the model's state."""
        leaf = isinstance(inputs, torch.Tensor) and inputs.requires_grad
        before = _written(self._stage)
        outputs: torch.Tensor = self._stage(inputs.clone() if leaf else inputs)  # its first layer may work in place
        if moved := sorted(dict(_written(self._stage) - before)):
            raise BadInput(
                f"the forward pass wrote {', '.join(moved[:3])} of the model. Under strategy volunteer any worker may "
                "make a pass, once or several times, and what it writes would stay there. Register what is no state "
                "with persistent=False, or use another strategy"
            )
        if not self.last and (outputs.shape[:1] != (asked.samples,) or outputs.dtype not in FLOATS):
            raise BadInput(
                f"a stage gave {outputs.dtype} {tuple(outputs.shape)} for {asked.samples} samples. Volunteers get some "
                "samples of a micro-batch: its activations are float numbers with a row for each"
            )
        return outputs

    def _loss(self, asked: StagePass, outputs: torch.Tensor, targets: Any) -> torch.Tensor:
        loss = self._parts.loss(outputs, targets)
        if loss.numel() != 1:
            raise BadInput(f"the loss has shape {tuple(loss.shape)}; it must be one number: the mean over the batch")
        return loss.reshape(()) * asked.samples

    def _fetched(self, asked: StagePass, numbers: torch.Tensor) -> tuple[Any, Any]:
        """(inputs, targets). What a sample draws (augmentation) is of its number and the step, for inputs and targets
        are fetched by different stages, in tasks of other samples. Raises BadInput for numbers that are none here."""
        parts, indices = self._parts, numbers.tolist()
        samples = len(parts.dataset)  # type: ignore[arg-type]
        if numbers.dtype != torch.int64 or numbers.shape != (asked.samples,) or min(indices) < 0:
            raise BadInput(f"a task of {asked.samples} samples names {len(indices)}. Is the server of this version?")
        if max(indices) >= samples:
            raise BadInput(
                f"a task names sample {max(indices)} of a dataset of {samples} here. The script has to make the same "
                "dataset wherever it runs"
            )
        fetched = []
        with Generators(asked.draws).in_place_of_global():
            for one in indices:
                seed_step(self._session.seed, one, asked.step)
                fetched.append(parts.dataset[one])
            return pair_of(parts.collate_fn(fetched), self._session.device)


class UnsentState:
    """Persistent buffers, parameters that do not train, and layers' modes (train or eval) of one stage.

    Volunteers are sent trained parameters. All else is as the script made it up to run.prepare_pipeline."""

    def __init__(self, stage: nn.Module, sent: Iterable[nn.Parameter]) -> None:
        known = {id(one) for one in sent}
        self._stage = stage
        self._tensors = {n: one for n, one in state_of(stage) if id(one) not in known and one.layout is torch.strided}
        self._digests = {name: digest_of(one) for name, one in self._tensors.items()}
        self._versions = {name: one._version for name, one in self._tensors.items()}
        self._modes = {name: one.training for name, one in stage.named_modules()}
        self._rewritten: set[str] = set()

    def rewritten(self) -> Sequence[str]:
        """Return the names of what is not, or was once not, as it was made."""
        moved = [name for name, one in self._tensors.items() if one._version != self._versions[name]]
        self._versions |= {name: self._tensors[name]._version for name in moved}
        self._rewritten |= {name for name in moved if digest_of(self._tensors[name]) != self._digests[name]}
        layers = self._stage.named_modules()
        self._rewritten |= {f"{name}.training".lstrip(".") for name, one in layers if one.training != self._modes[name]}
        return sorted(self._rewritten)


def _written(module: nn.Module) -> set[tuple[str, tuple[int, int]]]:
    """Return (name, address and version) of all parameters and persistent buffers: a write changes its entry."""
    return {(name, (tensor.data_ptr(), tensor._version)) for name, tensor in state_of(module)}


def state_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters and persistent buffers, each under every name that it has."""
    for path, one in module.named_modules():
        kept = {name: own for name, own in one._buffers.items() if name not in one._non_persistent_buffers_set}
        for name, tensor in {**one._parameters, **kept}.items():
            if tensor is not None:
                yield f"{path}.{name}".lstrip("."), tensor


def _vector(parameter: nn.Parameter) -> torch.Tensor:
    """Return its gradient, float32 [N]."""
    if parameter.grad is None:
        return torch.full((parameter.numel(),), UNREACHED, device=parameter.device)
    return parameter.grad.reshape(-1).float() + 0.0  # -0.0 becomes 0.0


def _unreached(sum_N: torch.Tensor) -> bool:
    """Return whether all entries are UNREACHED; mostly the first one tells."""
    return all(bool((part_N.signbit() & (part_N == 0)).all()) for part_N in (sum_N[:1], sum_N))


def device_kind(device: torch.device) -> str:
    """Return the name of what draws the same random numbers for the same seed."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def _drops_out_in_cudnn(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1
