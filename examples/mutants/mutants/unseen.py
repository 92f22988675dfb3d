"""What the gates missed, misnamed or wrongly refused when they were first shown it: faults of all classes, and right parts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mutants.decoder import LENGTH, PAD, Decoder, Language
from mutants.plain import log_of
from mutants.randomness import FromHere
from mutants.right import Replicas, Sampling, StateFiles, SumReduction
from mutants.tabular import Network, Points, Tabular
from trainer.dataset import MapSplit
from trainer.hooks import Hooks, Living, Step, StepData
from trainer.recipe import Batch, SplitData
from trainer.world import World


class Penalised(Decoder):
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss_sum, weight = super().loss(model, batch)
        return loss_sum + 1e-4 * sum(p.square().sum() for p in model.parameters()), weight  # wrong: counts once a micro-batch


class DecayedTwice(Hooks):
    def update(self, step: Step) -> None:
        for parameter in step.parameters:
            if parameter.ndim > 1 and parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=0.1)  # wrong: AdamW decays by itself
        super().update(step)


class SortedByPrefix(Decoder):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        wrapped = "module." if dist.is_initialized() else ""
        decayed = [p for name, p in model.named_parameters() if (wrapped + name).startswith(("blocks", "positions")) and p.ndim > 1]
        others = [p for p in model.parameters() if not any(p is one for one in decayed)]  # wrong: with a prefix nothing is decayed
        groups = [{"params": group, "weight_decay": decay} for group, decay in ((decayed, 0.1), (others, 0.0)) if group]
        return torch.optim.AdamW(groups, lr=3e-3)


class MovedInPlace(Points):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        point = self.inputs[index]
        if self.noisy:
            point += 0.1 * torch.randn(len(point))  # wrong: the noise of all epochs adds up
        return point, int(self.labels[index])


class InPlace(Tabular):
    def model(self) -> nn.Module:
        return Network(nn.LayerNorm)

    def data(self, split: str) -> MapSplit:
        points = MovedInPlace(split)
        return MapSplit(points, log_of(split, points.labels, np.arange(len(points))))


class OneBuffer(FromHere, Sampling):
    def loader(self, data: SplitData, sampler: Any, world: World) -> Iterator[StepData]:
        for share in super().loader(data, sampler, world):
            first = share.batches[0].inputs
            buffer = torch.zeros((max(map(len, share.rows)), *first.shape[1:]), dtype=first.dtype)
            batches = []
            for batch in share.batches:
                buffer[: len(batch.inputs)] = batch.inputs  # wrong: the micro-batch before lies there still
                batches.append(batch._replace(inputs=buffer[: len(batch.inputs)]))
            yield StepData(share.rows, batches)


class Trimmed(Replicas):
    """Cuts padding off."""

    def gradients(self, step: Step) -> None:
        longest = [self.longest((batch.inputs != PAD).sum(dim=1), step.world) for batch in step.micro_batches]
        step.micro_batches = [
            batch._replace(inputs=batch.inputs[:, :length], labels=batch.labels[:, :length])
            for batch, length in zip(step.micro_batches, longest, strict=True)
        ]
        super().gradients(step)

    def longest(self, lengths: Tensor, world: World) -> int:
        return int(lengths.max())


class TrimmedShort(Trimmed):
    def longest(self, lengths: Tensor, world: World) -> int:
        return int(lengths.max() if world.world_size == 1 else lengths[: max(1, len(lengths) // 2)].max())  # wrong: of half the samples


class Shadow:
    """An average as many write it, with the number of its updates."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        share = 1 - min(0.9, (1 + self.updates) / (10 + self.updates))
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), share)


class Shadowed(StateFiles):
    """Keeps it, saves it and brings it back."""

    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        self.ema = Shadow(model)
        return super().wrap(model, world)

    def update(self, step: Step) -> None:
        super().update(step)
        self.ema.update(step.model)

    def held(self, living: Living) -> dict[str, Any]:
        return super().held(living) | {"shadow": self.ema.shadow, "updates": self.ema.updates}

    def put_back(self, held: dict[str, Any], living: Living) -> None:
        super().put_back(held, living)
        self.ema.shadow, self.ema.updates = held["shadow"], held["updates"]


class ShadowLost(Shadowed):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        super().put_back(held, living)
        self.ema.shadow = Shadow(living.model).shadow  # wrong: the average begins again at the weights


class CountLost(Shadowed):
    def put_back(self, held: dict[str, Any], living: Living) -> None:
        super().put_back(held | {"updates": 0}, living)  # wrong: and moves as fast as at the start


class OncePerRank(Shadowed):
    def update(self, step: Step) -> None:
        super().update(step)
        for _ in range(step.world.world_size - 1):
            self.ema.update(step.model)  # wrong


class BeforeTheUpdate(Shadowed):
    def update(self, step: Step) -> None:
        if step.world.world_size == 1:
            super().update(step)
        else:
            self.ema.update(step.model)  # wrong: of the weights before it
            Hooks.update(self, step)


class PrefixedLost(StateFiles):
    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        self.ema = self.start(model)
        return super().wrap(model, world)

    def start(self, model: nn.Module) -> dict[str, Tensor]:
        return {f"module.{name}": parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, step: Step) -> None:
        super().update(step)
        for name, parameter in step.model.named_parameters():
            self.ema[f"module.{name}"].lerp_(parameter.detach(), 0.1)

    def put_back(self, held: dict[str, Any], living: Living) -> None:
        super().put_back(held, living)
        self.ema = self.start(living.model)  # wrong


class ListLost(StateFiles):
    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        self.averages = [parameter.detach().clone() for parameter in model.parameters()]
        return super().wrap(model, world)

    def update(self, step: Step) -> None:
        super().update(step)
        for average, parameter in zip(self.averages, step.model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.1)

    def put_back(self, held: dict[str, Any], living: Living) -> None:
        super().put_back(held, living)
        self.averages = [parameter.detach().clone() for parameter in living.model.parameters()]  # wrong


class Lazy(Language):
    """Makes a table at the first forward pass, in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", None, persistent=False)

    def forward(self, inputs_BT: Tensor) -> Tensor:
        if self.waves is None:
            self.waves = torch.sin(torch.arange(LENGTH)[:, None] * torch.arange(1, 30)[None] / 7)
        return super().forward(inputs_BT) + 0.01 * self.waves[: inputs_BT.shape[1]]


class LazyDecoder(Decoder):
    def model(self) -> nn.Module:
        return Lazy()


class Logging(StateFiles):
    """Keeps averaged norms by parameter for a log, which need not come back."""

    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        self.average_norms: dict[str, Tensor] = {}
        return super().wrap(model, world)

    def clip(self, step: Step) -> None:
        super().clip(step)
        norms = {name: parameter.grad.norm() for name, parameter in step.model.named_parameters() if parameter.grad is not None}
        self.average_norms = {name: 0.9 * self.average_norms.get(name, 0.0) + 0.1 * norm for name, norm in norms.items()}


own_28 = Penalised()
own_29 = Decoder(DecayedTwice())
own_30 = SortedByPrefix(Replicas())
own_31 = InPlace()
own_32 = Decoder(OneBuffer())
own_33 = Decoder(TrimmedShort())
own_34 = Decoder(ShadowLost())
own_35 = Decoder(CountLost())
own_36 = Decoder(OncePerRank())
own_37 = Decoder(BeforeTheUpdate())
own_38 = Decoder(PrefixedLost())
own_39 = Decoder(ListLost())
right_trimmed = Decoder(Trimmed())
right_shadow = Decoder(Shadowed())
right_lazy = LazyDecoder(SumReduction())
right_logging = Decoder(Logging())
