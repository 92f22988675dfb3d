"""A training's whole state by name: tensors, and everything else as JSON. What a checkpoint holds and a digest covers.

Tensor names: "weight/NAME", "buffer/NAME", "optimizer/PARAMETER/KEY". Nothing is pickled, so nothing is executed on the way back.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from validation.canonical import canonical_json
from validation.errors import DataError, RecipeError

_TAG = "~"  # marks a value that JSON has no form for: {"~": "tuple", "value": [...]}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """After `step` updates; tensors are the living ones, not copies."""

    step: int
    position: int  # samples consumed: the data loader's whole state
    seed: int
    tensors: Mapping[str, Tensor]
    plain: Mapping[str, Any]  # JSON types: optimizer groups and scalars, schedule


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, shared ones once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def snapshot(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None, *, step: int, position: int, seed: int) -> State:
    """Name everything that the next update depends on. Raises RecipeError when the optimizer or schedule keeps what JSON cannot hold."""
    tensors = {f"weight/{name}": value for name, value in weights_of(model).items()}
    tensors |= {f"buffer/{name}": value.detach() for name, value in model.named_buffers()}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value.detach()
            else:
                scalars.setdefault(name, {})[key] = to_plain(value)
    groups = [{key: to_plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    plain = {"groups": groups, "scalars": scalars, "schedule": None if schedule is None else to_plain(schedule.state_dict())}
    return State(step=step, position=position, seed=seed, tensors=tensors, plain=plain)


def restore(state: State, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None, *, moments: bool = True) -> None:
    """Put a state back into freshly built objects. Raises DataError when it belongs to another model.

    `moments=False` leaves the optimizer's tensors out: the planted defect "stale_moments_on_resume".
    """
    living = {f"weight/{name}": value for name, value in weights_of(model).items()}
    living |= {f"buffer/{name}": value.detach() for name, value in model.named_buffers()}
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
    """sha256 over names, types, shapes and bytes of every tensor, and over the optimizer's and schedule's plain values."""
    total = hashlib.sha256()
    for name, value in sorted(state.tensors.items()):
        total.update(canonical_json([name, str(value.dtype), list(value.shape)]))
        total.update(tensor_bytes(value))
    total.update(canonical_json(state.plain))
    return total.hexdigest()


def tensor_bytes(value: Tensor) -> memoryview:
    """A tensor's elements in row-major order, in the machine's own (little-endian) form."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_sha256(value: Tensor) -> str:
    """sha256 of a tensor's bytes."""
    return hashlib.sha256(tensor_bytes(value)).hexdigest()


def save_model(model: nn.Module, path: Path) -> None:
    """Write the model's state dict as safetensors: weights and persistent buffers by name, shared ones under each of their names."""
    copies = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in model.state_dict().items()}
    path.write_bytes(save(copies))


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
        f"the optimizer or its schedule keeps a {type(value).__name__}, which cannot be written as JSON. A checkpoint would lose it, so a "
        "resumed run would differ. Keep numbers, strings, lists and dictionaries in their state."
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
