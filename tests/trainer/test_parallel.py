"""What the exact FSDP2 rests on: optimizers that treat each element alike wherever it lies in a shard."""

import pytest
import torch

from trainer.parallel import ELEMENTWISE

OPTIONS = {
    torch.optim.SGD: {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    torch.optim.RMSprop: {"momentum": 0.9, "centered": True},
}


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_an_element_does_not_know_its_shard(kind: type[torch.optim.Optimizer], shards: int) -> None:
    """Twelve updates of a whole tensor and of its shards leave the same bits, whatever tail a vector loop has to treat apart."""
    options = {"lr": 0.01} | OPTIONS.get(kind, {})
    for rows, columns in ((67, 13), (9, 1), (33, 64)):
        assert torch.equal(updated(kind, options, rows, columns, 1), updated(kind, options, rows, columns, shards))


def updated(kind: type[torch.optim.Optimizer], options: dict[str, object], rows: int, columns: int, shards: int) -> torch.Tensor:
    """Weights after twelve updates, kept in `shards` parts by rows."""
    draw = torch.Generator().manual_seed(rows)
    start = torch.randn(rows, columns, generator=draw)
    parts = [torch.nn.Parameter(part.clone()) for part in start.chunk(shards)]
    optimizer = kind(parts, **options)  # type: ignore[arg-type]
    for _ in range(12):
        gradient = torch.randn(rows, columns, generator=draw)
        for parameter, piece in zip(parts, gradient.chunk(shards), strict=True):
            parameter.grad = piece.clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts])
