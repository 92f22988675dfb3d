"""Recipes in which everything is on that could make bits differ between world sizes; each built on the tiny one."""

import os
from dataclasses import replace

import numpy as np
import torch
from tiny_recipe import FEATURES, TinyData, TinyRecipe, recipe
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

ALL_ON = replace(
    recipe.training, accumulation=2, ema_decay=0.9, autocast="bfloat16", clip_norm=0.3, tail="drop", global_batch_size=64, epochs=2
)  # fmt: skip


def normed_net() -> nn.Module:
    """BatchNorm, dropout, a buffer that no state_dict holds, and a ModuleList for FSDP2 to shard one by one."""
    return NormedNet()


class NormedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 13)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(13, 13), nn.BatchNorm1d(13), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)
        )  # fmt: skip
        self.last = nn.Linear(13, 1)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if self.training:
            self.calls += 1
        return self.last(hidden)


def grouped_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay on matrices only."""
    matrices, vectors = [[p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False)]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)


class CountingRecipe(TinyRecipe):
    """A recipe with a state of its own: the sum of all steps that its schedule was asked for."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)  # type: ignore[arg-type]
        object.__setattr__(self, "seen", {"asked": 0})

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        def share(step: int) -> float:
            self.seen["asked"] += step  # type: ignore[attr-defined]
            return 1 - 0.9 * step / steps

        return LambdaLR(optimizer, share)

    def state_dict(self) -> dict[str, int]:
        return dict(self.seen)  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen.update(state)  # type: ignore[attr-defined]


everything = CountingRecipe(name="everything", training=ALL_ON, make_model=normed_net, make_optimizer=grouped_adamw)
normed = replace(recipe, name="normed", training=replace(ALL_ON, autocast="", accumulation=1), make_model=normed_net)
half = replace(recipe, name="half", training=replace(recipe.training, autocast="float16", loss_scale=2.0**20))
averaged = replace(recipe, name="averaged", training=replace(recipe.training, ema_decay=0.9))
accumulated = replace(recipe, name="accumulated", training=replace(recipe.training, accumulation=3))
lonely = replace(normed, name="lonely", training=replace(recipe.training, accumulation=3))


class Shifted(nn.Module):
    """A layer with a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) + self.shift


scalar = replace(recipe, name="scalar", make_model=Shifted)
mixing = replace(recipe, name="mixing", make_optimizer=lambda model: torch.optim.Adafactor(model.parameters()))
calm = replace(recipe, name="calm", training=replace(recipe.training, autocast="float16", loss_scale=256.0))


class Flagged(NormedNet):
    """A flag and a count of whole numbers among the moving buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("started", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int32))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.started[0] = True
            self.seen += 2
        return super().forward(inputs)


class Woven(NormedNet):
    """Blocks in blocks, a weight that two blocks share, a block that comes twice, and a layer that only some samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Nest(), *self.blocks, self.blocks[1], nn.Sequential(nn.Linear(13, 13), nn.Tanh())])
        self.blocks[-1][0].weight = self.blocks[0].own.weight
        self.spare = nn.Linear(13, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        result = super().forward(inputs)
        return result + self.spare(self.first(inputs)) if inputs[0, 0] > 0.3 else result


class Nest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleList([nn.Linear(13, 13), nn.Linear(13, 13)])
        self.own = nn.Linear(13, 13)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.inside:
            hidden = torch.tanh(layer(hidden))
        return self.own(hidden)


class Chosen(NormedNet):
    """One of two blocks of one size, by the data."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.last(hidden + self.blocks[int(inputs[0, 0] > 0)](hidden))


flagged = replace(normed, name="flagged", make_model=Flagged)
woven = replace(normed, name="woven", make_model=Woven)
chosen = replace(normed, name="chosen", make_model=Chosen)
parted = replace(recipe, name="parted", training=replace(recipe.training, accumulation=9))
fused = replace(recipe, name="fused", make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True))


class SmallNet(nn.Module):
    """Weights in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1).bfloat16()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs.bfloat16()).float()


small = replace(recipe, name="small", make_model=SmallNet)


class MixedRecipe(TinyRecipe):
    """Every rank sees the samples in another order."""

    def data(self, split: str) -> TinyData:
        made = super().data(split)
        order = np.random.default_rng(os.getpid()).permutation(len(made))
        made.inputs, made.labels, made.sample_ids = made.inputs[order], made.labels[order], made.sample_ids[order]
        return made


class Choosy(nn.Module):
    """A second head that only positive batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.first(inputs) + (self.second(inputs) if len(inputs) > 40 else 0.0)


mixed = MixedRecipe(name="mixed")
choosy = replace(recipe, name="choosy", make_model=Choosy)


class ListKeeping(torch.optim.SGD):
    """Keeps what JSON cannot hold."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = {parameter.shape}


listing = replace(recipe, name="listing", make_optimizer=lambda model: ListKeeping(model.parameters(), lr=0.1))
