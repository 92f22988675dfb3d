"""FSDP2: parameters, gradients and optimizer state sharded over ranks by rows; the bits of one rank (`exact`), or torch's own (`fast`).

In `exact` rank r of W runs lanes j W + r in slot j (trainer/lanes.py: strided). Each slot ends in one reduce-scatter a sharded module, that
brings the W lanes' chunks together and adds them in the canonical tree; the slots' sums are folded in the same tree. So every element is
added in the order of the unsharded exact reduction, and elementwise optimizers go on with equal bits. W has to be a power of two.
W = ranks, V = lanes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter  # the interface of the public set_custom_reduce_scatter
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from trainer.faults import FaultPlan
from trainer.lanes import Node, TreeFold
from trainer.moving import MovingBuffers
from trainer.recipe import Recipe
from trainer.reduce import SCALARS, Totals, all_gather, check_steps, counted, scalars_of, totals_of
from trainer.telemetry import StepClock
from trainer.world import World
from validation.errors import ConfigError, RankError, RecipeError

if TYPE_CHECKING:
    from trainer.feed import MicroBatch

# They update every element by itself, and their kernels give an element the same bits wherever it lies in a shard (tests/trainer/
# test_parallel.py asks each). An optimizer that mixes elements (Adafactor, LAMB, Muon) would see shards instead of tensors.
ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad, Adamax, ASGD)

Gradients = list[Tensor]  # sharded, one a parameter


def whole(value: Tensor) -> Tensor:
    """A tensor's full value. Collective when it is sharded."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; the tensor itself when it is not sharded."""
    return value.to_local() if isinstance(value, DTensor) else value


def check_sharding(recipe: Recipe, model: nn.Module, world: World) -> None:
    """Refuse what cannot be sharded with equal bits. Raises ConfigError or RecipeError, before anything is sharded."""
    lanes = recipe.training.lanes
    if world.world_size & (world.world_size - 1):
        raise ConfigError(
            f"--parallel fsdp2 on {world.world_size} ranks: lanes are added over ranks in a binary tree, so the number of ranks has to be "
            f"a power of two. Nothing was started. Use 1, 2, 4, ... up to {lanes} ranks, or --parallel ddp, which takes any number."
        )
    if scalars := [name for name, p in model.named_parameters() if p.ndim == 0]:
        raise RecipeError(
            f"recipe {recipe.name}: FSDP2 shards parameters by rows, and {', '.join(scalars[:3])} has none. "
            "Give scalar parameters the shape (1,), or train with --parallel ddp."
        )
    if strided := [name for name, p in model.named_parameters() if not p.is_contiguous()]:
        raise RecipeError(
            f"recipe {recipe.name}: FSDP2 shards contiguous parameters only, and {', '.join(strided[:3])} is not (transposed, "
            "channels_last). Make it contiguous in `model`, or train with --parallel ddp."
        )
    if sparse := [name for name, module in model.named_modules() if getattr(module, "sparse", None) is True]:
        raise RecipeError(
            f"recipe {recipe.name}: FSDP2 cannot shard the sparse gradient of {', '.join(sparse[:3])}. Set sparse=False, or train with "
            "--parallel ddp."
        )


def check_optimizer(recipe: Recipe, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on others or on its place: with shards it would compute something else."""
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise RecipeError(
            f"recipe {recipe.name}: nothing is known about {type(optimizer).__name__} on sharded parameters. If it mixes elements of a "
            f"tensor (norms, factored moments), its numbers change with the number of ranks. Use "
            f"--reduction fast, --parallel ddp, or one of {known}."
        )
    if any(group.get("fused") for group in optimizer.param_groups):
        raise RecipeError(
            f"recipe {recipe.name}: {type(optimizer).__name__}(fused=True) rounds by an element's place, which shards move, "
            "so the result would depend on the number of ranks. Leave out fused, or use --parallel ddp or --reduction fast."
        )
    if small := sorted({str(p.dtype) for group in optimizer.param_groups for p in group["params"] if p.dtype.itemsize < 4}):
        raise RecipeError(
            f"recipe {recipe.name}: updates of {', '.join(small)} weights round by the place in a tensor, which shards move, so "
            'the result would depend on the number of ranks. Keep weights in float32 and set training.autocast="bfloat16", or use '
            "--parallel ddp or --reduction fast."
        )


def shard(recipe: Recipe, model: nn.Module, world: World, device: torch.device) -> None:
    """Shard a model's parameters over all ranks, in place. Collective."""
    mesh = init_device_mesh(device.type, (world.world_size,), mesh_dim_names=("ranks",))
    for unit in _units(recipe, model):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _units(recipe: Recipe, model: nn.Module) -> Iterable[nn.Module]:
    """Modules that are gathered one by one: what the recipe says, else the members of every nn.ModuleList."""
    named = getattr(recipe, "shard_units", None)
    if named is not None:
        return list(named(model))
    members = [member for module in model.modules() if isinstance(module, nn.ModuleList) for member in module]
    places = _places(model)
    # inner ones first, as fully_shard wants them; lists have no forward pass; a weight that is used elsewhere, too, is left to the whole
    return [
        member for member in reversed(members)
        if (own := _places(member)) and not isinstance(member, nn.ModuleList | nn.ModuleDict) and own.items() <= places.items()
    ]  # fmt: skip


def _places(model: nn.Module) -> Counter[int]:
    """In how many places of a model each parameter stands, by its id."""
    return Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))


class ShardedReduction:
    """Adds gradients over ranks while each rank keeps only its rows of the sum."""

    def __init__(
        self, model: nn.Module, world: World, lanes: int, clock: StepClock, faults: FaultPlan, moving: MovingBuffers, *,
        exact: bool, coupled: bool, calls: Sequence[str],
    ) -> None:  # fmt: skip
        """Args: calls, modules in the order in which a forward pass runs them."""
        self.module = model
        self._world = world
        self._clock = clock
        self._faults = faults
        self._moving = moving
        self._exact = exact
        self._one_by_one = exact or coupled
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._slots = lanes // world.world_size
        self._level = world.world_size.bit_length() - 1  # of the tree's nodes that a slot's reduce-scatter makes
        self._last_lane = 0
        self._fold: TreeFold[Gradients] = TreeFold(_add)
        self._scalars: list[Tensor] = []  # SCALARS of each own lane (exact) or group (fast), float64
        self._moved: list[Tensor] = []  # moving buffers' sums of each own lane
        self._fresh = True
        units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FSDPModule)}
        self._expected = tuple(name for name in calls if name in units)
        self._ran: list[str] = []  # units of the forward pass in work
        self._is_forward = False
        for name, unit in units.items():
            self._prepare(name, unit)

    def _prepare(self, name: str, unit: FSDPModule) -> None:
        # before torch's own hook, which gathers the unit's weights; activation checkpoints run it once more, inside backward
        unit.register_forward_pre_hook(lambda *_: self._run(name) if self._is_forward else None, prepend=True)  # type: ignore[attr-defined]
        if hasattr(unit, "set_reduce_scatter_unused_params"):  # of torch 2.13
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
        if self._exact:
            unit.set_custom_reduce_scatter(TreeReduceScatter(self._clock))

    def _run(self, name: str) -> None:
        """Note that a unit runs. Raises RankError when another one is due: other ranks would exchange other weights."""
        self._ran.append(name)
        if self._expected[: len(self._ran)] != tuple(self._ran):
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise RankError(
            f"rank {self._world.rank}: a micro-batch ran the sharded modules {', '.join(map(repr, self._ran))}, the run's first samples "
            f"{', '.join(map(repr, self._expected))}. Ranks gather and reduce them together, so weights of different modules were about to "
            "be mixed. The update was not made. For modules that only some samples use, train with --parallel ddp, or give the recipe a "
            "shard_units(model) that leaves them out."
        )

    def groups(self, lanes: range) -> list[range]:
        """One micro-batch a lane in `exact`, and where samples of a micro-batch are coupled; else all lanes of the rank in one."""
        groups = [range(lane, lane + 1) for lane in lanes] if self._one_by_one else [lanes]
        self._last_lane = groups[-1][0]
        return groups

    def forward(self, micro: "MicroBatch") -> AbstractContextManager[Any]:
        """A lane's parts are added up before they travel."""
        self._moving.rewind()
        self.module.set_requires_gradient_sync(self._travels(micro))  # type: ignore[operator]
        self._ran.clear()
        self._is_forward = True
        return nullcontext()

    def _travels(self, micro: "MicroBatch") -> bool:
        return micro.is_last and (self._exact or micro.lane == self._last_lane)

    def backward(self, step: int, micro: "MicroBatch", loss_sum: Tensor, weight: Tensor, scale: float) -> None:  # noqa: ARG002 - the step is asked in `finish`
        """Backward with a reduce-scatter a sharded module after the lane's last part."""
        self._is_forward = False
        if len(self._ran) != len(self._expected):
            self._refuse()
        if self._fresh:
            self._begin()
        self._scalars[-1] += scalars_of(micro, loss_sum, weight)
        if self._moving.size and micro.counts:
            self._moved[-1] += self._moving.seen()
        counted(micro, loss_sum, scale).backward()  # type: ignore[no-untyped-call]
        if self._exact and micro.is_last:
            self._fold.push(Node(self._level, micro.lane // self._world.world_size), self._take())
        if micro.is_last and micro.lane != self._last_lane:
            self._open_lane()

    def _begin(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._scalars, self._moved, self._fresh = [], [], False
        self._open_lane()

    def _open_lane(self) -> None:
        first = local(self._parameters[0])
        self._scalars.append(first.new_zeros(SCALARS, dtype=torch.float64, requires_grad=False))
        self._moved.append(first.new_zeros(self._moving.size, requires_grad=False))

    def _take(self) -> Gradients:
        """This slot's sum over ranks, taken off the parameters, so that torch does not add the next slot's to it."""
        taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return taken

    def finish(self, step: int) -> Totals:
        """Exchange the scalars and moving buffers; leave the sharded sums in .grad. Collective."""
        self._clock.arrive()
        self._fresh = True
        if self._exact:
            [(_, root)] = self._fold.held
            self._fold.held.clear()
        else:
            root = self._take()
        for parameter, gradient in zip(self._parameters, root, strict=True):
            parameter.grad = gradient
        skips = self._faults.skips(step)
        self._faults.at("collective", step)
        scalars, moved = (torch.stack(self._scalars), torch.stack(self._moved)) if skips else self._exchange(step)
        totals, micro_batches = totals_of(scalars)
        if self._moving.size:
            fold: TreeFold[Tensor] = TreeFold(Tensor.add_)
            for lane, row in enumerate(moved):
                fold.push(Node(0, lane), row)
            self._moving.settle(fold.held[0][1], micro_batches)
        return totals

    def _exchange(self, step: int) -> tuple[Tensor, Tensor]:
        """(V, SCALARS) and (V, n) of all lanes in lane order, or of all ranks' groups in `fast`. Collective. Raises RankError."""
        own = torch.stack(self._scalars)
        row = torch.cat([own.new_tensor([step]), own.reshape(-1), torch.stack(self._moved).double().reshape(-1)])
        rows = row.new_empty((self._world.world_size, row.numel()))
        all_gather(rows.view(-1), row)
        check_steps(rows[:, 0], self._world.rank, step)
        # lane j W + r is slot j of rank r: slots first, ranks inside
        scalars = rows[:, 1 : 1 + own.numel()].reshape(self._world.world_size, len(own), SCALARS).transpose(0, 1).reshape(-1, SCALARS)
        moved = rows[:, 1 + own.numel() :].reshape(self._world.world_size, len(own), self._moving.size).transpose(0, 1).flatten(0, 1)
        return scalars, moved.to(self._moved[0].dtype)


class TreeReduceScatter(ReduceScatter):
    """torch.distributed.fsdp's ReduceScatter: brings every rank's chunk c to rank c and adds the ranks' in a binary tree."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A fresh buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False) -> None:  # noqa: ARG002 - torch's signature
        """(W * c,) of every rank -> (c,) on each. Collective."""
        self._clock.lap("backward")
        rows = torch.empty_like(input_tensor)
        dist.all_to_all_single(rows, input_tensor.add_(0.0), group=group)  # adding 0 turns -0 into 0, as adding to a zeroed buffer does
        fold: TreeFold[Tensor] = TreeFold(Tensor.add_)
        for rank, row in enumerate(rows.view(group.size(), -1)):
            fold.push(Node(0, rank), row)
        output_tensor.copy_(fold.held[0][1])
        self._clock.lap("collective")


def _add(left: Gradients, right: Gradients) -> Gradients:
    torch._foreach_add_([local(value) for value in left], [local(value) for value in right])
    return left
