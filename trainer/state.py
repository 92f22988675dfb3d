"""A training's whole state by name: tensors, and everything else as JSON. What a checkpoint holds and a digest covers.

Tensor names: "weight/NAME", "buffer/NAME", "ema/NAME", "optimizer/PARAMETER/KEY". A checkpoint is taken between updates, so no gradient is
half accumulated, and every random stream starts anew from (seed, step, lane) or (seed, epoch, sample): step and seed are its state. An
own sampler's state lies beside the recipe's; random streams that go on from step to step need hooks of their own to be saved.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.parallel import whole
from validation.canonical import canonical_json
from validation.errors import DataError, RecipeError

_TAG = "~"  # marks a value that JSON has no form for: {"~": "tuple", "value": [...]}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """After `step` updates; tensors are the living ones, not copies, and DTensors where they are sharded."""

    step: int
    position: int  # samples consumed: the data loader's whole state
    seed: int
    tensors: Mapping[str, Tensor]
    plain: Mapping[str, Any]  # JSON types: optimizer groups and scalars, schedule, loss scaler, the recipe's and an own sampler's state


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, shared ones once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def snapshot(
    model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None, *, step: int, position: int, seed: int,
    ema: Mapping[str, Tensor] | None = None, extra: Mapping[str, Any] | None = None,
) -> State:  # fmt: skip
    """Name everything that the next update depends on; `extra` is what else has a state_dict, by name.

    Raises: RecipeError when the optimizer, schedule or recipe keeps what JSON cannot hold.
    """
    tensors = {f"weight/{name}": value for name, value in weights_of(model).items()}
    tensors |= {f"buffer/{name}": value.detach() for name, value in model.named_buffers()}
    tensors |= {f"ema/{name}": value for name, value in (ema or {}).items()}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value.detach()
            else:
                scalars.setdefault(name, {})[key] = to_plain(value)
    groups = [{key: to_plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    plain = {
        "groups": groups, "scalars": scalars, "schedule": None if schedule is None else to_plain(schedule.state_dict()),
        "extra": {name: to_plain(value) for name, value in (extra or {}).items()},
    }  # fmt: skip
    return State(step=step, position=position, seed=seed, tensors=tensors, plain=plain)


def restore(
    state: State, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None, *,
    ema: Mapping[str, Tensor] | None = None, moments: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Put a state back into freshly built objects. Raises DataError when it belongs to another model.

    `moments=False` leaves the optimizer's tensors out: the planted defect "stale_moments_on_resume".
    Returns: the `extra` of the snapshot.
    """
    living = {f"weight/{name}": value for name, value in weights_of(model).items()}
    living |= {f"buffer/{name}": value.detach() for name, value in model.named_buffers()}
    living |= {f"ema/{name}": value for name, value in (ema or {}).items()}
    held = {name: value for name, value in state.tensors.items() if not name.startswith("optimizer/")}
    strange = sorted(
        name for name in living.keys() | held.keys()
        if name not in living or name not in held or living[name].shape != held[name].shape or living[name].dtype != held[name].dtype
    )  # fmt: skip
    if strange:
        raise DataError(
            f"the checkpoint of step {state.step} does not fit this model: {', '.join(strange[:5])} differ in name, shape or type. "
            "Resuming would mix two models. Use the recipe that wrote it, or start a new run in an empty folder."
        )
    with torch.no_grad():
        for name, value in living.items():
            value.copy_(held[name])
    optimizer.load_state_dict(_optimizer_state(state, model, optimizer, moments=moments))
    if schedule is not None:
        schedule.load_state_dict(from_plain(state.plain["schedule"]))
    return {name: from_plain(value) for name, value in state.plain["extra"].items()}


def blank(model: nn.Module) -> Callable[[str, torch.Size, torch.dtype], Tensor]:
    """A function that makes an empty tensor for a name of a state, sharded as the model's parameter of that name is."""
    parameters = dict(model.named_parameters())

    def make(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        kind, _, rest = name.partition("/")
        parameter = parameters.get(rest.rpartition("/")[0] if kind == "optimizer" else rest)
        if isinstance(parameter, DTensor) and parameter.shape == shape and kind != "buffer":
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype)

    return make


def _optimizer_state(state: State, model: nn.Module, optimizer: Optimizer, *, moments: bool) -> dict[str, Any]:
    """The form that Optimizer.load_state_dict takes: state by the parameter's number in the groups."""
    parameters = dict(model.named_parameters())
    numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    entries: dict[int, dict[str, Any]] = {}
    for name, scalars in state.plain["scalars"].items():
        entries.setdefault(numbers[id(parameters[name])], {}).update({key: from_plain(value) for key, value in scalars.items()})
    for full, value in state.tensors.items():
        if full.startswith("optimizer/"):
            name, _, key = full.removeprefix("optimizer/").rpartition("/")
            entries.setdefault(numbers[id(parameters[name])], {})[key] = value
    groups = [
        {key: from_plain(value) for key, value in plain.items()} | {"params": [numbers[id(p)] for p in group["params"]]}
        for plain, group in zip(state.plain["groups"], optimizer.param_groups, strict=True)
    ]
    return {"state": entries if moments else {}, "param_groups": groups}


def state_digest(state: State) -> str:
    """sha256 over names, types, shapes and bytes of every tensor, the plain values, and what the random streams start from.

    Collective when tensors are sharded: the digest is of the whole tensors, the same for every way to shard them.
    """
    total = hashlib.sha256(canonical_json([state.step, state.position, state.seed]))
    for name, value in sorted(state.tensors.items()):
        total.update(canonical_json([name, str(value.dtype), list(value.shape)]))
        total.update(tensor_bytes(whole(value)))
    total.update(canonical_json(state.plain))
    return total.hexdigest()


def tensor_bytes(value: Tensor) -> memoryview:
    """A tensor's elements in row-major order, in the machine's own (little-endian) form."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_sha256(value: Tensor) -> str:
    """sha256 of a tensor's bytes."""
    return hashlib.sha256(tensor_bytes(value)).hexdigest()


def served_weights(model: nn.Module, ema: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict that serves, whole and copied: averaged weights where there are, persistent buffers; shared ones under each name.

    Collective when the model is sharded.
    """
    average = {id(parameter): ema[name] for name, parameter in model.named_parameters() if name in ema}
    held = model.state_dict(keep_vars=True)
    return {
        name: whole(average.get(id(value), value)).detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in held.items()
    }  # fmt: skip


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict as safetensors."""
    path.write_bytes(save(dict(weights)))


def to_plain(value: Any) -> Any:
    """JSON types for what optimizers and schedules keep; floats keep every bit. Raises RecipeError for anything else."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
    if isinstance(value, Tensor) and value.numel() == 1:
        return {_TAG: "tensor", "value": to_plain(value.item()), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "value": [to_plain(item) for item in value]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {_TAG: kind, "value": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    raise RecipeError(
        f"the optimizer, its schedule, the recipe or its sampler keeps a {type(value).__name__}, which JSON cannot hold. A checkpoint "
        "would lose it, so a resumed run would differ. Keep numbers, strings, lists and dictionaries in their state."
    )


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    inner = value["value"]
    match value[_TAG]:
        case "float":
            return float(inner)
        case "tensor":
            return torch.tensor(from_plain(inner), dtype=getattr(torch, value["dtype"]))
        case "tuple":
            return tuple(from_plain(item) for item in inner)
        case "counter":
            return Counter({from_plain(key): item for key, item in inner})
        case _:
            return {from_plain(key): from_plain(item) for key, item in inner}
