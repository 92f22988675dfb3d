"""What a recipe has to hold before its first step, asked of the real model and a real batch. Every failure is a RecipeError with a fix."""

import math
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer.dataset import Rows, kept_streams, seed_streams
from trainer.hooks import PATH, brought
from trainer.recipe import Batch, Recipe, SplitData
from trainer.reduce import all_gather
from trainer.state import tensor_bytes
from trainer.world import World
from validation.errors import RecipeError

REPEAT_TOLERANCE = 1e-5  # kernels that add in another order each time (atomics on GPUs) stay far below
DOUBLING_TOLERANCE = 1e-3  # float32 sums of a few hundred samples agree to 1e-5; a mean is off by a factor of two
HALVES_TOLERANCE = 1e-6  # float64 sums agree to 1e-14; BatchNorm may move an untrained model's loss by less than a thousandth


class Probed(NamedTuple):
    """What a first backward pass showed."""

    has_unused: bool  # some parameter takes no part in the loss of the probe batch
    moving: tuple[str, ...]  # buffers that the forward pass changes
    coupled: bool  # what is in a micro-batch matters: samples see one another (BatchNorm), or buffers move with each forward pass
    calls: tuple[str, ...] = ()  # modules that the forward pass ran, in order
    together: bool = False  # samples see one another


def switch_off_dropout(model: nn.Module) -> None:
    """Put every module of torch's that drops out to eval, attention and recurrent ones too; p stays as it is, and so do modules inside."""
    for module in _dropping(model):
        module.training = False


def _dropping(model: nn.Module) -> list[nn.Module]:
    """The modules of torch's that drop out while training."""
    return [module for module in model.modules() if isinstance(module, _DropoutNd | nn.MultiheadAttention | nn.RNNBase)]


def check_modules(recipe: Recipe, model: nn.Module) -> None:
    """Refuse modules whose numbers depend on how many ranks there are, and those that are not finished."""
    if lazy := [name for name, parameter in model.named_parameters() if isinstance(parameter, UninitializedParameter)]:
        raise RecipeError(
            f"recipe {recipe.name}: {len(lazy)} parameters have no shape yet ({', '.join(lazy[:3])}). Ranks could not start from the same "
            "weights. Give the lazy modules their sizes, or call the model on an example once in model()."
        )
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm):
            raise RecipeError(
                f"recipe {recipe.name}: SyncBatchNorm '{name}' normalises over whatever all ranks hold at once, so the result would "
                "depend on their number. Use BatchNorm: it normalises over one micro-batch, the same at every world size."
            )


def check_model(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse models that have nothing to learn or gradients of several types, and optimizers that miss or add parameters."""
    own = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if not own:
        raise RecipeError(
            f"recipe {recipe.name}: the model has no trainable parameter. Nothing would be learned. Set requires_grad on some."
        )
    if len(types := {str(p.dtype) for p in model.parameters() if p.requires_grad}) > 1:
        raise RecipeError(
            f"recipe {recipe.name}: parameters are of several types ({', '.join(sorted(types))}); gradients are added in one. Use one."
        )
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if strangers := len(optimized - own.keys()):
        raise RecipeError(
            f"recipe {recipe.name}: the optimizer holds {strangers} parameters that are not the model's. They would be updated without a "
            "gradient of this model. Build it from the model that `optimizer(model)` is given."
        )
    if missing := [name for key, name in own.items() if key not in optimized]:
        raise RecipeError(
            f"recipe {recipe.name}: the optimizer misses {len(missing)} parameters ({', '.join(missing[:3])}). They would never learn. "
            "Add them to a parameter group, or set requires_grad to False."
        )


def check_stepping(recipe: Recipe, optimizer: Optimizer, schedule: LRScheduler | None) -> None:
    """Refuse what cannot be stepped once an update without further arguments. Raises RecipeError."""
    if isinstance(optimizer, LBFGS):
        raise RecipeError(
            f"recipe {recipe.name}: LBFGS evaluates the loss several times an update, and an update here has one gradient, added over all "
            "ranks. Use an optimizer whose step() needs no closure (AdamW, SGD)."
        )
    if isinstance(schedule, ReduceLROnPlateau) or not (schedule is None or hasattr(schedule, "step")):
        raise RecipeError(
            f"recipe {recipe.name}: the schedule is a {type(schedule).__name__}, but it is stepped once an update, without a metric. Use "
            "one that follows the number of updates (LambdaLR, OneCycleLR, CosineAnnealingLR, SequentialLR), or None."
        )


def check_loss(recipe: Recipe, model: nn.Module, batch: Batch, *, dropout: bool, again: bool = False) -> Probed:
    """Ask the loss of a real batch: two scalars, a sum and not a mean, attached, with a positive weight. The model stays as it was.

    `again`: after a death only what the run needs to know is asked; the rest was checked before the first step.
    """
    calls: list[str] = []
    handles = [module.register_forward_pre_hook(lambda *_, name=name: calls.append(name)) for name, module in model.named_modules()]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    loss_sum = _checked_sum(recipe, recipe.loss(model, batch))
    for handle in handles:
        handle.remove()
    ran = tuple(calls)
    if "" not in ran:
        raise RecipeError(
            f"recipe {recipe.name}: loss(model, batch) went around model(...). Distributed wrappers work in that call only. "
            "Call model(batch.inputs) in `loss`."
        )
    moving = tuple(name for name, value in model.named_buffers() if name in buffers and not torch.equal(value, buffers[name]))
    gradients = _gradients(recipe, model, loss_sum)
    if not again:
        _check_doubling(recipe, model, batch)
        _check_streams(recipe, model, batch, buffers)
        if not dropout:
            _check_repeatable(recipe, model, batch)
    together = is_coupled(recipe, model, batch)
    _put_back(model, buffers)
    return Probed(
        has_unused=any(gradient is None for gradient in gradients),
        moving=moving,
        coupled=bool(moving) or together,
        calls=ran,
        together=together,
    )


def is_coupled(recipe: Recipe, model: nn.Module, batch: Batch) -> bool:
    """Whether two halves of a batch have another loss than the whole while training, Dropout modules off. Moves the model's buffers.

    A loss that is random all the same tells nothing, and neither do fewer than four samples: both count as not coupled.
    """
    size = len(batch.weights)
    if size < 4:
        return False
    halves = [Batch(*(value[rows] for value in batch)) for rows in (slice(0, size // 2), slice(size // 2, size))]
    asleep = [module for module in _dropping(model) if module.training]
    switch_off_dropout(model)
    with torch.no_grad():
        once, again = (recipe.loss(model, batch)[0].item() for _ in range(2))
        parts = sum(recipe.loss(model, half)[0].item() for half in halves)
    in_double = all(parameter.dtype == torch.float64 for parameter in model.parameters())
    for module in asleep:
        module.training = True
    return once == again and abs(once - parts) > (HALVES_TOLERANCE if in_double else DOUBLING_TOLERANCE) * (abs(once) + 1e-6)


def check_same_data(recipe: Recipe, world: World, device: torch.device, seen: Sequence[Any]) -> None:
    """Every rank has to have loaded the same split. Collective. Raises RecipeError on all ranks.

    Args: seen, what is compared, as contiguous buffers: sample ids, then the first samples.
    """
    if world.world_size == 1:
        return
    own = torch.tensor([zlib.crc32(part) for part in seen] + [len(seen[0])], dtype=torch.int64, device=device)
    everywhere = own.new_empty((world.world_size, own.numel()))
    all_gather(everywhere.view(-1), own)
    if strange := [rank for rank, row in enumerate(everywhere) if not torch.equal(row, everywhere[0])]:
        raise RecipeError(
            f"recipe {recipe.name}: data('train') gave rank {strange[0]} other samples than rank 0 ({len(strange)} of {world.world_size} "
            "ranks differ). Ranks would train on a mixture that nobody chose. Let data() depend on its argument alone: no clock, no "
            "randomness, no rank, no file that changes."
        )


def check_pure(recipe: Recipe, train: SplitData, rows: Rows) -> None:
    """Try a split's word that its `batch` depends on rows alone: with other random streams, and in another thread. Raises RecipeError."""
    with kept_streams():
        seed_streams(1)
        first = train.batch(rows)
        untouched = torch.rand(()), np.random.random(), random.random()
        seed_streams(1)
        drew = untouched != (torch.rand(()), np.random.random(), random.random())
        seed_streams(2)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(train.batch, rows).result()
    if drew or list(map(tensor_bytes, first)) != list(map(tensor_bytes, second)):
        what = "it draws random numbers" if drew else "the same rows had other bytes when they were fetched again by another thread"
        raise RecipeError(
            f"recipe {recipe.name}: data('train').pure says that batch(rows) depends on its rows alone, and {what}. Fetched behind the "
            "training step, samples or dropout would differ from run to run. Remove `pure`; for augmentation give keyed_batch(rows, keys)."
        )


def check_coupled(recipe: Recipe, probed: Probed, smallest: int) -> None:
    """Refuse micro-batches of fewer than two samples where samples see one another. Raises RecipeError.

    Args: smallest, samples of the smallest micro-batch of the run.
    """
    if probed.together and smallest < 2:
        raise RecipeError(
            f"recipe {recipe.name}: the samples of a micro-batch are normalised together, and some micro-batches would have {smallest}. "
            'Those have no spread. Set training.tail="drop", a larger or divisible global_batch_size, or less accumulation.'
        )


def _checked_sum(recipe: Recipe, value: object) -> Tensor:
    if not (isinstance(value, tuple) and len(value) == 2 and all(isinstance(item, Tensor) and item.ndim == 0 for item in value)):
        raise RecipeError(
            f"recipe {recipe.name}: loss must return two scalar tensors (sum, weight), got {_described(value)}. Both are added over ranks "
            "as they are. Sum over the samples (reduction='sum'), and return what they weigh as a tensor: batch.weights.sum()."
        )
    loss_sum, weight = cast(tuple[Tensor, Tensor], value)
    if not (math.isfinite(weight.item()) and weight.item() > 0):
        raise RecipeError(
            f"recipe {recipe.name}: loss gave the weight {weight.item():g} for a batch that is not empty. The mean over the global "
            "batch would be undefined. Return the sum of the samples' weights (their number when all count one)."
        )
    if not math.isfinite(loss_sum.item()):
        raise RecipeError(
            f"recipe {recipe.name}: the loss sum of the first samples is {loss_sum.item()} before any update, and gradients would be, too. "
            "Look for NaN or infinity in the inputs (missing values, a division by a spread of 0) and for log(0), sqrt(0) or exp of a "
            "large number in `loss`."
        )
    return loss_sum


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_described(item) for item in value)})"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _gradients(recipe: Recipe, model: nn.Module, loss_sum: Tensor) -> tuple[Tensor | None, ...]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients: tuple[Tensor | None, ...] = (None,)
    if loss_sum.requires_grad:
        gradients = torch.autograd.grad(loss_sum, parameters, allow_unused=True)
    if all(gradient is None for gradient in gradients):
        raise RecipeError(
            f"recipe {recipe.name}: the loss sum is not attached to the model's parameters, so nothing would be learned. "
            "Remove detach(), no_grad() or .item() from `loss`."
        )
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    broken = [name for name, gradient in zip(names, gradients, strict=True) if gradient is not None and not gradient.isfinite().all()]
    if broken:
        raise RecipeError(
            f"recipe {recipe.name}: the loss of the first samples is finite, but not the gradient of {len(broken)} parameters "
            f"({', '.join(broken[:3])}). The first update would end the training. Look for a slope without bound in `loss` or the model: "
            "sqrt or norm at 0 (add a small number inside), where(..., x / 0), a division by a spread of 0."
        )
    return gradients


def _check_doubling(recipe: Recipe, model: nn.Module, batch: Batch) -> None:
    """Every sample twice must give twice the sum and twice the weight; a mean does not.

    A recipe that brings a path of its own may gather samples over ranks (a contrastive loss): it is compared with whole batches.
    """
    with evaluating(model):
        once = [value.item() for value in recipe.loss(model, batch)]
        twice = [value.item() for value in recipe.loss(model, Batch(*(torch.cat((item, item)) for item in batch)))]
    slack = DOUBLING_TOLERANCE * (abs(once[0]) + abs(twice[0]) + once[1] * 1e-3)
    is_mean = abs(twice[1] - 2 * once[1]) > DOUBLING_TOLERANCE * twice[1] or abs(twice[0] - once[0]) <= slack < abs(once[0])
    is_coupling = abs(twice[0] - 2 * once[0]) > slack
    if is_mean or (is_coupling and not set(PATH) & set(brought(getattr(recipe, "hooks", None)))):
        raise RecipeError(
            f"recipe {recipe.name}: with every sample twice, loss gives (sum, weight) = ({twice[0]:.6g}, {twice[1]:.6g}) after "
            f"({once[0]:.6g}, {once[1]:.6g}). It is a mean, or couples samples of a batch, so it cannot be split over ranks. "
            "Return the plain sum over samples (reduction='sum') and the sum of their weights."
        )


def _put_back(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Buffers as they were; one that the first forward pass made (a table that is filled when it is asked for) stays."""
    with torch.no_grad():
        for name, value in model.named_buffers():
            if name in buffers:
                value.copy_(buffers[name])


def _check_streams(recipe: Recipe, model: nn.Module, batch: Batch, buffers: Mapping[str, Tensor]) -> None:
    """The same weights, buffers, samples and streams must give one loss: what else changes is in no checkpoint, and differs by rank."""
    seen = []
    for _ in range(2):
        _put_back(model, buffers)
        torch.manual_seed(1)
        seed_streams(1)
        with torch.no_grad():
            seen.append(recipe.loss(model, batch)[0].item())
    if abs(seen[0] - seen[1]) > REPEAT_TOLERANCE * (abs(seen[0]) + 1e-6):
        raise RecipeError(
            f"recipe {recipe.name}: the same weights, buffers, samples and random streams gave the losses {seen[0]:.9g} and {seen[1]:.9g}. "
            "Something else changes from call to call, which no checkpoint holds and which differs by rank. Draw from the global streams "
            "(torch without generator=, numpy.random, random), and keep counters in buffers."
        )


def is_random(recipe: Recipe, model: nn.Module, batch: Batch) -> bool:
    """Whether two seeds give two losses."""
    once, again = _two_seeds(recipe, model, batch)
    return once != again


def _two_seeds(recipe: Recipe, model: nn.Module, batch: Batch) -> list[float]:
    """The loss sum under each of two seeds, from the same buffers; they end as they were."""
    seen, buffers = [], {name: value.clone() for name, value in model.named_buffers()}
    for seed in (1, 2):
        _put_back(model, buffers)
        seed_streams(seed)
        with torch.no_grad():
            seen.append(recipe.loss(model, batch)[0].item())
    _put_back(model, buffers)
    return seen


def _check_repeatable(recipe: Recipe, model: nn.Module, batch: Batch) -> None:
    """With Dropout modules off nothing may be random: two seeds must give one loss."""
    seen = _two_seeds(recipe, model, batch)
    if seen[0] != seen[1]:
        raise RecipeError(
            f"recipe {recipe.name}: the loss is still random with every nn.Dropout module off ({seen[0]:.9g}, {seen[1]:.9g}). It cannot be "
            "compared with a reference. Use nn.Dropout modules instead of functional dropout, and no other randomness in the model."
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode without gradients; every module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
