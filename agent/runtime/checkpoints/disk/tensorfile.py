"""Tensors to and from one file in the safetensors format, hashed on the way.

The format: header length (8 bytes, little endian), header (JSON: name -> dtype, shape, offsets), then the data. Written
and read here tensor by tensor, so that neither takes a second copy of the whole state, a full disk is an error at the
write that hit it, and every byte is hashed as it passes. Other tools open the files with the safetensors library."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol, TypeGuard

import torch
import xxhash

from atoll.agent.runtime.checkpoints.disk.manifest import CHUNK_BYTES, Content, Hasher
from atoll.agent.runtime.staging import StagingRing, staging_ring
from atoll.errors import CheckpointError

MAX_HEADER_BYTES: Final = 100_000_000  # as in the safetensors library

DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Readable(Protocol):
    def readinto(self, buffer: memoryview, /) -> int | None: ...


def ordered(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names in the order of their bytes: wide elements first keeps every tensor aligned to its element. CheckpointError
    for what the format cannot hold."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"tensor {name} is {tensor.dtype}, which a checkpoint cannot hold; convert it")
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def serialized(
    tensors: Mapping[str, torch.Tensor],
    staging: Callable[[torch.device], StagingRing | None] = staging_ring,
) -> Iterator[memoryview]:
    """The file's bytes in order. CPU tensors are not copied; those of a device come through a staging ring, and a part
    of theirs holds until the next. CheckpointError for what the format cannot hold."""
    header: dict[str, Any] = {}
    rings = {device: staging(device) for device in {tensor.device for tensor in tensors.values()}}
    order = ordered(tensors)
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    listed = json.dumps(header, separators=(",", ":")).encode()
    listed += b" " * (-len(listed) % 8)
    if len(listed) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the list of {len(tensors)} tensors takes {len(listed)} bytes, over {MAX_HEADER_BYTES}")
    yield memoryview(len(listed).to_bytes(8, "little") + listed)
    for name in order:
        tensor, ring = tensors[name].detach(), rings[tensors[name].device]
        if ring is not None:
            yield from (piece.data for piece in ring.staged(tensor))
            continue
        view = bytes_of(tensor.contiguous())
        for begin in range(0, len(view), CHUNK_BYTES):
            yield view[begin : begin + CHUNK_BYTES]


def deserialized(source: Readable, size: int) -> tuple[dict[str, torch.Tensor], Content]:
    """The tensors in `size` bytes of `source`, and what was read. Nothing is to be used before Content is compared.

    Raises CheckpointError where the bytes are not such a file."""
    hasher = Hasher()

    def fill(buffer: memoryview, what: str) -> None:
        filled = 0
        while filled < len(buffer):
            count = source.readinto(buffer[filled : filled + CHUNK_BYTES])  # a store reads so much ahead
            if not count:
                raise CheckpointError(f"it ends in the middle of {what}")
            filled += count
        hasher.update(buffer)

    prefix = bytearray(8)
    fill(memoryview(prefix), "its first 8 bytes")
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"bytes 0 to 8 say that its header has {length} bytes, more than fit")
    listed = bytearray(length)
    fill(memoryview(listed), "its header")
    tensors = {}
    for name, dtype, shape in _parse_header(bytes(listed), size - 8 - length):
        tensor = torch.empty(shape, dtype=dtype)
        fill(bytes_of(tensor), f"tensor {name}")
        tensors[name] = tensor
    return tensors, hasher.content()


def _parse_header(listed: bytes, data_bytes: int) -> list[tuple[str, torch.dtype, list[int]]]:
    """Entries in the order of their data, which they fill without gap or overlap."""
    try:
        header = json.loads(listed)
        entries = sorted(
            (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]), name, str(entry["dtype"]), entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__"
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"its header (from byte 8) cannot be read: {error}") from error
    offset, found = 0, []
    for begin, end, name, dtype, shape in entries:
        if dtype not in DTYPES or not is_shape(shape):
            raise CheckpointError(f"its header gives tensor {name} the dtype {dtype!r} and the shape {shape!r}")
        if begin != offset or end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise CheckpointError(f"its header puts tensor {name} at {begin} to {end}, which does not fit")
        offset = end
        found.append((name, DTYPES[dtype], shape))
    if offset != data_bytes:
        raise CheckpointError(f"its header accounts for {offset} of {data_bytes} bytes of data")
    return found


def is_shape(shape: object) -> TypeGuard[list[int]]:
    """Return whether a tensor can have this shape: torch counts entries, and strides if there are none, in 64 bits."""
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        return False
    entries: int = math.prod(max(size, 1) for size in shape)
    return entries < 2**60


def digest_of(tensor: torch.Tensor) -> str:
    """Return a hash of the tensor's content, wherever it lies."""
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor.detach().cpu().contiguous()))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().reshape(-1).view(torch.uint8).numpy().data
