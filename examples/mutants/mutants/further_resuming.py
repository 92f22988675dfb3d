"""Further publicly reported faults of classes G and H, by other mechanisms, and their right twins."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mutants.decoder import Decoder
from mutants.randomness import FromHere, Noisy
from mutants.resuming import sampling
from mutants.right import Files, Sampling, Shuffled, StateFiles
from trainer.hooks import Living, Rows, Step, StepData
from trainer.recipe import SplitData, Training
from trainer.streams import hash64
from trainer.world import World

ROOM = 24  # samples in a shuffle buffer


class JustBegun(Shuffled):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        into = self.position % self.size
        if into < self.training.global_batch_size:
            self.position += self.size - into  # wrong: an epoch that has just begun is not done


class Buffered(Shuffled):
    """A stream in its own order through a shuffle buffer."""

    def __init__(self, size: int, training: Training, world: World) -> None:
        super().__init__(size, training, world)
        self.read, self.room, self.draw = 0, list[int](), np.random.default_rng(training.seed)

    def take(self) -> Sequence[Rows]:
        count = self.training.global_batch_size
        if self.position + count > self.end:
            return ()
        self.position += count
        return self.cut(np.array([self.next() for _ in range(count)], dtype=np.int64))

    def next(self) -> int:
        """One row out of the buffer, which is filled up before."""
        while len(self.room) < ROOM and self.read < self.end:
            self.room.append(self.read % self.size)
            self.read += 1
        return self.room.pop(int(self.draw.integers(len(self.room))))

    def state_dict(self) -> dict[str, Any]:
        drawn = self.draw.bit_generator.state
        numbers = {name: str(value) for name, value in drawn["state"].items()}  # of 128 bits
        return {"position": self.position, "read": self.read, "room": list(self.room), "numbers": numbers, "spare": drawn["uinteger"],
                "has_spare": drawn["has_uint32"]}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.read, self.room = state["position"], state["read"], list(state["room"])
        self.draw.bit_generator.state = {
            "bit_generator": "PCG64", "state": {name: int(value) for name, value in state["numbers"].items()},
            "has_uint32": state["has_spare"], "uinteger": state["spare"],
        }  # fmt: skip


class BufferLost(Buffered):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = self.read = state["position"]  # wrong: what lay in the buffer is gone, and the draws begin anew


class Scaled(StateFiles):
    """A loss scale that grows after every fourth update; a power of two, so that no bit depends on it."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    def update(self, step: Step) -> None:
        for parameter in step.parameters:
            parameter.grad = None if parameter.grad is None else self.scaler.scale(parameter.grad)
        self.scaler.unscale_(step.optimizer)
        self.scaler.step(step.optimizer)
        self.scaler.update()
        if step.schedule is not None:
            step.schedule.step()

    def held(self, living: Living) -> dict[str, Any]:
        return super().held(living) | {"scaler": self.scaler.state_dict()}

    def put_back(self, held: dict[str, Any], living: Living) -> None:
        super().put_back(held, living)
        self.scaler.load_state_dict(held["scaler"])


class ScaleLost(Scaled):
    def held(self, living: Living) -> dict[str, Any]:
        fresh = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        return super().held(living) | {"scaler": fresh.state_dict()}  # wrong: the scale of a run that begins


class Averaged(StateFiles):
    """An average of the weights that the hooks keep."""

    average: torch.optim.swa_utils.AveragedModel

    def wrap(self, model: torch.nn.Module, world: World) -> torch.nn.Module:
        decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
        return super().wrap(model, world)

    def update(self, step: Step) -> None:
        super().update(step)
        self.average.update_parameters(step.model)

    def held(self, living: Living) -> dict[str, Any]:
        return super().held(living) | {"average": self.average.state_dict()}

    def put_back(self, held: dict[str, Any], living: Living) -> None:
        super().put_back(held, living)
        self.average.load_state_dict(held["average"])


class KeptAverageLost(Averaged):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        super().put_back(held | {"average": self.average.state_dict()}, living)  # wrong: the average of a model that has just been built


class OthersStreams(Files):
    def stream_file(self, folder: Path, world: World) -> Path:
        saved = len(list(folder.glob("rank*.pt")))
        return folder / f"rank{world.rank % saved}.pt"  # wrong: a rank that is new draws what another one draws


class Drawing(FromHere, Sampling, StateFiles):
    """A loader in the process whose data draws from numpy's stream, another one on every rank; saved and loaded."""

    is_started = False

    def loader(self, data: SplitData, sampler: Any, world: World) -> Iterator[StepData]:
        if not self.is_started:
            np.random.seed(hash64(7, world.rank) & 0xFFFFFFFF)
        self.is_started = True
        yield from super().loader(data, sampler, world)

    def save(self, folder: Path, living: Living) -> None:
        _, words, *rest = np.random.get_state()
        torch.save([torch.from_numpy(np.asarray(words, dtype=np.int64)), *rest], folder / f"numpy{living.world.rank}.pt")
        super().save(folder, living)

    def load(self, folder: Path, living: Living) -> None:
        super().load(folder, living)
        path = folder / f"numpy{living.world.rank}.pt"
        if path.exists():
            words, *rest = torch.load(path)
            np.random.set_state(("MT19937", self.brought_back(words.numpy().astype(np.uint32)), *rest))
            self.is_started = True

    def brought_back(self, words: Any) -> Any:
        """Words of the generator."""
        return words


class NumpyForgotten(Drawing):
    def brought_back(self, words: Any) -> Any:
        return np.random.RandomState(7).get_state()[1]  # wrong: a generator that begins anew


class Unfreezing(StateFiles):
    """The embedding learns from the sixth update on."""

    made = 0

    def gradients(self, step: Step) -> None:
        super().gradients(step)
        gradient = step.parameters[0].grad
        if self.number(step) < 5 and gradient is not None:
            gradient.zero_()
        self.made += 1

    def number(self, step: Step) -> int:
        """Updates made before this one."""
        return step.number


class UnfreezingAgain(Unfreezing):
    def number(self, step: Step) -> int:
        return self.made  # wrong: counted since this process began


right_buffer = Decoder(sampling(Buffered)())
right_scale = Decoder(Scaled())
right_average = Decoder(Averaged())
right_drawing = Noisy(Drawing())
right_unfreezing = Decoder(Unfreezing())
fu_11 = Decoder(sampling(JustBegun)())
fu_12 = Decoder(sampling(BufferLost)())
fu_13 = Decoder(ScaleLost())
fu_14 = Decoder(KeptAverageLost())
fu_15 = Decoder(OthersStreams())
fu_16 = Noisy(NumpyForgotten())
fu_17 = Decoder(UnfreezingAgain())
