"""Classes G and H: where the data goes on after a death, and what of the state comes back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mutants.decoder import Decoder, Language
from mutants.right import Everything, Files, Sampling, Shuffled, StateFiles
from mutants.tabular import Tabular
from trainer.hooks import Living, StepData
from trainer.world import World

# G: the position in the data


class FirstEpochAgain(Shuffled):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"] % self.size  # wrong: the place in the epoch without the epoch


class UpdatesForMicroBatches(Shuffled):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"] // self.training.accumulation  # wrong: an update has more than one micro-batch


class SinceThisStart(Shuffled):
    began = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position - self.began}  # wrong: counts from the last resume, not from the start

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = self.began = state["position"]


class UpdatesTimesRanks(Shuffled):
    def state_dict(self) -> dict[str, Any]:
        size = self.training.global_batch_size
        return {"updates": self.position // size, "own": size // self.world.world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        size = state["own"] * self.world.world_size  # wrong: with other ranks the global batch is another one
        self.training = replace(self.training, global_batch_size=size)
        self.position = state["updates"] * size


class OneBatchAgain(Shuffled):
    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position - self.training.global_batch_size}  # wrong: as it was before this update


def sampling(chosen: type[Shuffled]) -> type[Everything]:
    """The whole own trainer with this sampler."""
    return type(f"With{chosen.__name__}", (Everything,), {"kind": chosen})


class ForwardedStream(Everything):
    def load(self, folder: Path, living: Living) -> None:
        super().load(folder, living)
        torch.randperm(living.step + 1)  # wrong: skipping what was seen draws from the stream that was just put back


class TakenAhead(StateFiles, Sampling):
    """A loader that fetches two updates ahead, and asks the sampler for them."""

    def loader(self, data: Any, sampler: Any, world: World) -> Any:
        waiting = []
        while len(rows := sampler.take()):  # wrong: the sampler's state is two updates ahead of training
            waiting.append(rows)
            if len(waiting) > 2:
                yield self.fetched(data, waiting.pop(0))
        yield from (self.fetched(data, rows) for rows in waiting)

    def fetched(self, data: Any, rows: Any) -> StepData:
        """The micro-batches of one update."""
        return StepData(rows, [data.batch(part) for part in rows])


# H: the state


class OneStreamForAll(Everything):
    def stream_file(self, folder: Path, world: World) -> Path:
        return folder / "rank0.pt"  # wrong: rank 0's stream on every rank


class OnlyKnownMoments(StateFiles):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        fresh = living.optimizer.state_dict()["state"]
        held["optimizer"]["state"] = {key: value for key, value in held["optimizer"]["state"].items() if key in fresh}  # wrong: none yet
        super().put_back(held, living)


class SwappedMoments(StateFiles):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        moments = held["optimizer"]["state"]
        first, second = alike(living.optimizer)
        moments[first], moments[second] = moments[second], moments[first]  # wrong: by place, and two places were changed
        super().put_back(held, living)


def alike(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Places of two parameters of the same shape."""
    shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    first = next(place for place, shape in enumerate(shapes) if shapes.count(shape) > 1)
    return first, shapes.index(shapes[first], first + 1)


class NoCount(StateFiles):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        for moments in held["optimizer"]["state"].values():
            moments["step"] = torch.zeros_like(moments["step"])  # wrong: the moments are old, their correction begins anew
        super().put_back(held, living)


class ZeroedRows(StateFiles):
    def held(self, living: Living) -> dict[str, Any]:
        held = super().held(living)
        weight = held["model"]["blocks.0.mlp_in.weight"].clone()
        weight[len(weight) // 2 :] = 0  # wrong: the second rank's rows were never written
        return held | {"model": held["model"] | {"blocks.0.mlp_in.weight": weight}}


class MissingKey(StateFiles):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        fresh = {name: value.clone() for name, value in living.model.state_dict().items()}
        held["model"]["blocks.0.mlp_in.weight"] = fresh["blocks.0.mlp_in.weight"]  # wrong: a missing name is passed over in silence
        super().put_back(held, living)


class RoundedOnLoad(StateFiles):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        for value in held["model"].values():
            value.copy_(value.to(torch.bfloat16))  # wrong: the weights come back with eight bits
        super().put_back(held, living)


class ScheduleBehind(StateFiles):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        held["schedule"]["last_epoch"] -= 1  # wrong: saved before its own step
        super().put_back(held, living)


class ScheduleLost(StateFiles):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        assert living.schedule is not None
        super().put_back(held | {"schedule": living.schedule.state_dict()}, living)  # wrong: the warm-up begins again


class AverageLost(StateFiles):
    def put_back_average(self, held: dict[str, Any], living: Living) -> None:
        with torch.no_grad():
            for name, value in living.ema.items():
                value.copy_(dict(living.model.named_parameters())[name])  # wrong: the average begins again


class AverageAsWeights(StateFiles):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        held["model"] |= held["ema"]  # wrong: training goes on from the average
        super().put_back(held, living)


class StatisticsLost(StateFiles):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        fresh = {name: value.clone() for name, value in living.model.named_buffers()}
        held["model"] |= fresh  # wrong: the running statistics are those of a fresh model
        super().put_back(held, living)


class UntiedLanguage(Language):
    """Two matrices that have the same values when they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.output.weight = nn.Parameter(self.embedding.weight.detach().clone())


class UntiedDecoder(Decoder):
    def model(self) -> nn.Module:
        return UntiedLanguage()


class TiedOnLoad(StateFiles):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        held["model"]["output.weight"] = held["model"]["embedding.weight"].clone()  # wrong: it says that they are one, and they are not
        super().put_back(held, living)


class Counting(Language):
    """Dims what it learns by how often it was called; the count is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, inputs_BT: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(inputs_BT) * (1 + 0.1 * torch.exp(-self.get_buffer("calls") / 20))


class CountingDecoder(Decoder):
    def model(self) -> nn.Module:
        return Counting()


class DecayForgotten(StateFiles):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        super().put_back(held, living)
        for group in living.optimizer.param_groups:
            group["weight_decay"] = 0.01  # wrong: what the groups were told is not what a default says


class LateSave(StateFiles):
    """Keeps what it saves in memory, and writes what it kept the time before."""

    waiting: dict[str, Any] | None = None

    def held(self, living: Living) -> dict[str, Any]:
        fresh = super().held(living)
        before, self.waiting = self.waiting, {**fresh, "model": {name: value.clone() for name, value in fresh["model"].items()}}
        return fresh if before is None else fresh | {"model": before["model"]}  # wrong: the weights of the save before


right = Decoder(Everything())
right_files = Decoder(StateFiles())
right_tabular = Tabular(StateFiles())
right_streams = Decoder(Files())
right_untied = UntiedDecoder(StateFiles())
se_59 = Decoder(sampling(FirstEpochAgain)())
se_61 = Decoder(ForwardedStream())
se_62 = Decoder(sampling(UpdatesForMicroBatches)())
se_64 = Decoder(sampling(SinceThisStart)())
se_67 = Decoder(sampling(UpdatesTimesRanks)())
se_68 = Decoder(OneStreamForAll())
se_70 = Decoder(OnlyKnownMoments())
se_72 = Decoder(SwappedMoments())
se_74 = Decoder(ZeroedRows())
se_74_missing = Decoder(MissingKey())
se_76 = Decoder(RoundedOnLoad())
se_78 = Decoder(ScheduleBehind())
se_78_lost = Decoder(ScheduleLost())
se_79 = Tabular(AverageLost())
se_79_weights = Tabular(AverageAsWeights())
se_82 = UntiedDecoder(TiedOnLoad())
syn_02 = Tabular(StatisticsLost())
own_22 = Decoder(NoCount())
own_23 = Decoder(sampling(OneBatchAgain)())
own_24 = Decoder(TakenAhead())
own_25 = CountingDecoder(StateFiles())
own_26 = Decoder(DecayForgotten())
own_27 = Decoder(LateSave())
