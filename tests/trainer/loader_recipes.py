"""Recipes whose samples are drawn anew in every epoch, from all three random streams, fetched with and without loader workers."""

import os
import random
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tiny_recipe import JUDGE, TRAIN, TinyData, TinyRecipe

from trainer.dataset import MapSplit
from trainer.order import Order
from trainer.recipe import Batch
from validation.errors import DataError

Sample = tuple[torch.Tensor, np.float32, np.float32]


class Augmented:
    """The tiny points, map-style, each moved a little by torch, numpy and Python, and some of them blanked."""

    def __init__(self, points: TinyData) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Sample:
        moved = torch.from_numpy(self.points.inputs[index]) + 0.1 * torch.randn(6)
        moved[np.random.randint(6)] += random.uniform(-1, 1)
        return moved * float(np.random.rand() < 0.9), self.points.labels[index], self.points.weights[index]


class NotingData(MapSplit):
    """Leaves the pid of whoever fetches in the folder that a variable names."""

    def keyed_batch(self, rows: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64]) -> Batch:
        Path(os.environ["NOTED"], f"pid-{os.getpid()}").touch()
        return super().keyed_batch(rows, keys)


class JitterData(TinyData):
    """Not keyed by sample: draws for the whole batch."""

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        batch = super().batch(rows)
        noise = torch.randn(len(rows), 6) + torch.from_numpy(np.random.rand(len(rows), 6)).float() + random.random()
        return batch._replace(inputs=batch.inputs + 0.1 * noise)


class Unpicklable(Exception):
    """An error that takes more than its text."""

    def __init__(self, text: str, more: int) -> None:
        super().__init__(f"{text}{more}")


BAD = int(Order(seed=3, size=TRAIN, epochs=2, global_batch_size=47).rows(range(150, 151))[0])  # a row of the fourth batch


class BrokenData(TinyData):
    """Fails at the row BAD, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__(TRAIN, 1)
        self.way = way

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        if BAD in rows:
            if self.way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.way == "shape":
                return super().batch(rows[1:])
            raise {"data": DataError(f"row {BAD} is torn"), "value": ValueError(f"row {BAD}?"), "odd": Unpicklable("row ", BAD)}[self.way]
        return super().batch(rows)


class PureData(TinyData):
    """Says what is true of it, and fails in a rank's main thread once a thread fetches ahead."""

    pure = True
    ahead = 0

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        self.ahead += threading.current_thread().name.startswith("fetch")
        assert threading.current_thread() is not threading.main_thread() or not self.ahead
        return super().batch(rows)


@dataclass(frozen=True)
class LoaderRecipe(TinyRecipe):
    """TinyRecipe on one of these splits."""

    kind: str = "augmented"

    def data(self, split: str) -> TinyData:
        points = TinyData(TRAIN, 1) if split == "train" else TinyData(JUDGE, 2)
        if split == "judge" or self.kind == "jitter":
            return JitterData(TRAIN, 1) if split == "train" else points
        if self.kind in ("augmented", "noting"):
            kind = MapSplit if self.kind == "augmented" else NotingData
            return kind(Augmented(points), points.frame, points.sample_ids)  # type: ignore[return-value]
        return {"pure": PureData, "unsaid": TinyData}[self.kind](TRAIN, 1) if self.kind in ("pure", "unsaid") else BrokenData(self.kind)


def variant(kind: str, workers: int, **options: object) -> LoaderRecipe:
    plain = LoaderRecipe(kind=kind)
    return replace(plain, training=replace(plain.training, loader_workers=workers, **options))


augmented0, augmented1, augmented3 = (variant("augmented", workers) for workers in (0, 1, 3))
jitter0, jitter2 = (variant("jitter", workers) for workers in (0, 2))
noting2 = variant("noting", 2)
parts0, parts2 = (variant("augmented", workers, accumulation=3, tail="drop") for workers in (0, 2))
data0, data2, value0, value2, odd0, odd2, shape0, shape2 = (
    variant(kind, workers) for kind in ("data", "value", "odd", "shape") for workers in (0, 2)
)
kill2 = variant("kill", 2)
pure, unsaid = variant("pure", 0), variant("unsaid", 0)
