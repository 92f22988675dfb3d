"""What a sample has to look like: unknown where an own loader pads it by its company."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from trainer.expecting import contents_of
from trainer.problem import Part, Samples
from trainer.recipe import Batch


def part(samples: int, length: int) -> Part:
    batch = Batch(torch.zeros(samples, length), torch.zeros(samples, length), torch.ones(samples))
    return Part(np.arange(samples), batch)


def test_padding_by_company_cannot_be_foretold() -> None:
    """Micro-batches of several lengths are cut and padded otherwise on other ranks: no sample's bytes are demanded."""
    rows = Samples(np.arange(5), np.empty(0, dtype=np.uint64))
    problem = SimpleNamespace(brought=("loader",), parts=((part(2, 7), part(3, 4)),), samples=(rows,))

    assert contents_of(cast(Any, None), cast(Any, problem), 1) == [[""] * 5]
