"""The global gradient norm, with the same bits however parameters are sharded: rows first, then one sum over all rows.

A parameter is sharded by rows (dim 0), so each row lies whole on some rank. Every row's norm is one reduction over contiguous memory that
does not know how many rows lie beside it; the norms of all rows are then summed as one vector of float64, whose length and order are
the model's. torch's own clip_grad_norm_ sums within shards first, and its bits depend on the number of ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.parallel import local
from trainer.reduce import all_gather


def row_norms(gradient: Tensor) -> Tensor:
    """Euclidean norm of each row: (rows, ...) -> (rows,); a vector's rows are its elements."""
    rows = gradient.flatten(1) if gradient.ndim > 1 else gradient.unsqueeze(1)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def global_norm(gradients: Sequence[Tensor], *, by_rows: bool = True) -> float:
    """Euclidean norm of all gradients together; not finite when any element is not. Collective when they are sharded (DTensor).

    `by_rows=False`, for whole gradients, takes tensor by tensor as torch does: faster, in the bits of this layout alone.
    """
    if isinstance(gradients[0], DTensor):
        rows = _gathered(gradients)
    elif by_rows:
        rows = [row_norms(gradient) for gradient in gradients]
    elif len(gradients) == 1:
        return float(torch.linalg.vector_norm(gradients[0]))
    else:
        return float(torch.stack(torch._foreach_norm(list(gradients))).norm())
    return float(torch.cat(rows).double().norm())


def _gathered(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Row norms of sharded gradients, all rows on every rank; rows lie as torch.chunk lays them."""
    world_size = dist.get_world_size()
    heights = [-(-gradient.shape[0] // world_size) for gradient in gradients]
    shards = [local(gradient) for gradient in gradients]
    own = shards[0].new_zeros(sum(heights))
    for place, part in zip(torch.split(own, heights), shards, strict=True):
        place[: part.shape[0]].copy_(row_norms(part))
    everywhere = own.new_empty((world_size, own.numel()))
    all_gather(everywhere.view(-1), own)
    blocks = torch.split(everywhere, heights, dim=1)
    return [block.reshape(-1)[: gradient.shape[0]] for block, gradient in zip(blocks, gradients, strict=True)]


def as_one(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The same elements as one vector, where whole gradients lie one behind the other in one memory; else the gradients."""
    first = gradients[0]
    if isinstance(first, DTensor):
        return list(gradients)
    storage = first.untyped_storage()
    begin = end = first.data_ptr()
    for gradient in gradients:
        if gradient.data_ptr() != end or gradient.dtype != first.dtype or not gradient.is_contiguous():
            return list(gradients)
        end += gradient.nbytes
    if end > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return list(gradients)
    return [first.as_strided(((end - begin) // first.element_size(),), (1,))]


def clip_(gradients: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale gradients in place so that their global norm is at most `limit`, as torch.nn.utils.clip_grad_norm_ does."""
    share = limit / (norm + 1e-6)
    if share < 1.0:
        torch._foreach_mul_([local(gradient) for gradient in gradients], share)
