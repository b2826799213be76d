"""Where a kernel's call is placed: which devices this build has code for, and what runs on copies on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atoll import kernels
from atoll.errors import BadInput
from atoll.kernels import _native, compress, cuda_device, signs

ROOT = Path(__file__).parents[2]
UNCACHED = cuda_device._why_on_cpu.__wrapped__


def built(monkeypatch: pytest.MonkeyPatch, *architectures: int, devices: int = 1) -> None:
    """Take this build for one with code for these architectures."""
    module = SimpleNamespace(architectures=architectures, device_count=lambda: devices)
    monkeypatch.setattr(cuda_device, "_cuda", module)
    monkeypatch.setattr(cuda_device, "_why_on_cpu", UNCACHED)


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ((75, 80, 90), (7, 0), False),  # V100 and nvcc 13
        ((60, 70, 75, 80, 90), (7, 0), True),
        ((60, 70, 75, 80, 90), (6, 1), True),  # the code for 6.0
        ((75, 80, 90), (7, 5), True),
        ((75, 80, 90), (8, 6), True),  # the code for 8.0
        ((75, 80, 90), (12, 0), True),  # the PTX of 9.0
        ((75, 80, 90, 100, 120), (10, 3), True),
    ],
)
def test_a_device_has_code_from_the_oldest_architecture_on(
    monkeypatch: pytest.MonkeyPatch, architectures: tuple[int, ...], capability: tuple[int, int], runs: bool
) -> None:
    built(monkeypatch, *architectures)
    assert (cuda_device.missing_code(capability) is None) == runs


def test_what_is_missing_says_what_would_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    built(monkeypatch, 75, 80)
    volta, kepler = cuda_device.missing_code((7, 0)), cuda_device.missing_code((3, 5))
    assert volta is not None
    assert volta.reason == "the CUDA kernels of this build need compute capability 7.5, the device has 7.0"
    assert "CUDA 12" in volta.next_step
    assert kepler is not None
    assert "CUDA 12" not in kepler.next_step
    built(monkeypatch, 75, devices=0)
    old_driver = cuda_device.missing_code((9, 0))
    assert old_driver is not None
    assert "update the NVIDIA driver" in old_driver.next_step
    monkeypatch.setattr(cuda_device, "_cuda", None)
    without = cuda_device.missing_code((9, 0))
    assert without is not None
    assert ("no CUDA kernels" in without.reason, "CUDA_HOME" in without.next_step) == (True, True)
    assert not kernels.has_cuda()


def test_each_device_is_judged_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A V100 beside an A100: calls on the one go to its queue, those on the other are copied."""
    built(monkeypatch, 75, 80)
    capabilities = {0: (7, 0), 1: (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=7))
    v100, a100 = (SimpleNamespace(is_cuda=True, device=torch.device("cuda", index)) for index in (0, 1))
    assert cuda_device.queue_of((None, v100)) is None
    assert cuda_device.queue_of((None, a100)) == (cuda_device._cuda, 7)
    assert cuda_device.why_on_cpu(v100.device) is not None
    assert cuda_device.why_on_cpu(a100.device) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    on_rocm = cuda_device.why_on_cpu(a100.device)
    assert on_rocm is not None
    assert "ROCm" in on_rocm.reason


@pytest.mark.usefixtures("without_code")
def test_a_twin_gets_copies_and_what_it_wrote_comes_back() -> None:
    """What the kernel only reads is not copied back; entries that it leaves alone stay."""
    gradient, residual = torch.randn(64), torch.zeros(64)
    index, values = torch.full((4,), -1, dtype=torch.int32), torch.full((4, 16), 7.0)
    seen = []

    def twin(*arguments: object, threads: int) -> tuple[int, int, int]:
        seen.extend(one.data_ptr() for one in arguments if isinstance(one, torch.Tensor))
        result = _native.topk_block(*arguments, threads=threads)
        assert isinstance(arguments[0], torch.Tensor)
        arguments[0].fill_(9)
        return result

    expected = gradient.clone()
    chosen = cuda_device.run("topk_block", twin, gradient, residual, 1.0, index[:2], values[:2], threads=1)
    assert chosen == (2, 4, 0)
    assert not {gradient.data_ptr(), residual.data_ptr(), index.data_ptr(), values.data_ptr()} & set(seen)
    assert gradient.equal(expected)
    sent = torch.zeros(4, 16)
    sent[index[:2].long()] = values[:2]
    assert (sent.flatten() + residual).equal(gradient)
    assert index[2:].eq(-1).all()
    assert values[2:].eq(7).all()


@pytest.mark.usefixtures("without_code")
def test_buffers_of_two_devices_are_refused() -> None:
    elsewhere = torch.empty(64, device="meta")
    with pytest.raises(BadInput, match="residual is on another device than gradient"):
        compress.topk_block(torch.zeros(64), elsewhere, torch.zeros(1, dtype=torch.int32), torch.zeros(1, 16))


def test_every_cuda_kernel_has_a_fallback() -> None:
    """The kernels of the CUDA module are those that `run` knows, with its arguments. A kernel that writes a buffer
    that is not marked would lose its result: its tests on copies fail."""
    stub = (ROOT / "kernels/_cuda.pyi").read_text()
    declared = {
        name: [one.split(":")[0].strip() for one in re.sub(r"\s+", " ", arguments).split(",")]
        for name, arguments in re.findall(r"^def (\w+)\((.*?)\) ->", stub, flags=re.MULTILINE | re.DOTALL)
    }
    del declared["device_count"]
    known = {name: [one.strip("*") for one in arguments] for name, arguments in cuda_device.ARGUMENTS.items()}
    assert known == {name: arguments[:-1] for name, arguments in declared.items()}  # the last is the stream


def test_signs_on_copies_have_the_bits_of_the_twin(request: pytest.FixtureRequest) -> None:
    results = []
    for on_copies in (False, True):
        if on_copies:
            request.getfixturevalue("without_code")
        values = torch.randn(3000, generator=torch.Generator().manual_seed(1))
        bits = torch.empty(signs.sign_bytes(3000), dtype=torch.uint8)
        scales, out = torch.empty(signs.sign_blocks(3000), 2), torch.ones(3000)
        signs.sign_encode(values, bits, scales, two_sided=True)
        signs.sign_add(bits, scales, out, two_sided=True)
        results.append([one.numpy().tobytes() for one in (values, bits, scales, out)])
    assert results[0] == results[1]
