"""What a loss was really computed of: one digest a sample. B = samples of a batch."""

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from validation.canonical import canonical_json

DIGITS = 16  # hex digits that are kept of a sha256: two of 2**32 samples agree by chance once in two runs


def content_digests(batch: Iterable[Tensor]) -> list[str]:
    """Digest each sample's input, label and weight: type, shape and bytes, in the batch's order.

    Floating values count as float32, so a float64 leg, whose inputs were cast up, has the digests of the samples as they were loaded.
    Args: batch, tensors of (B, ...) each, a Batch. Returns: B times 16 hex digits of sha256.
    """
    parts = [_plain(value) for value in batch]
    head = hashlib.sha256(canonical_json([[str(part.dtype), list(part.shape[1:])] for part in parts]))
    rows = np.concatenate([_bytes(part) for part in parts], axis=1)
    return [_with(head, row) for row in rows]


def _plain(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return (value.to(torch.float32) if value.is_floating_point() else value).contiguous()


def _bytes(part: Tensor) -> npt.NDArray[np.uint8]:
    """(B, bytes of a sample)."""
    count = len(part)
    return part.reshape(-1).view(torch.uint8).numpy().reshape(count, -1) if part.numel() else np.empty((count, 0), dtype=np.uint8)


def _with(head: "hashlib._Hash", row: npt.NDArray[np.uint8]) -> str:
    whole = head.copy()
    whole.update(row.data)
    return whole.hexdigest()[:DIGITS]
