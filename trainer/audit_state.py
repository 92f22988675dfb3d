"""A rank's whole state as one digest a name."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.parallel import whole
from trainer.state import State, tensor_sha256
from validation.canonical import digest

AVERAGES = ("ema", "average", "avg", "shadow", "polyak", "swa")  # what people call averaged weights
WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")  # what wrappers put before a parameter's name


def state_digests(state: State, *, streams: bool = False) -> dict[str, str]:
    """sha256 of every named part: tensors by their bytes, plain values by their canonical JSON.

    Names: "weight/fc.bias", "optimizer/fc.bias/exp_avg", "plain/groups/0/lr", "plain/schedule/last_epoch", "plain/extra/scaler/scale",
    "plain/step", "plain/position", "plain/seed"; with `streams`, where the team's own code decides where random numbers start, also
    "stream/torch". Collective when tensors are sharded: the digest is of the whole tensor.
    """
    found = {name: tensor_sha256(whole(value)) for name, value in state.tensors.items()}
    plain = {"step": state.step, "position": state.position, "seed": state.seed, **state.plain}
    found |= {"/".join(("plain", *path)): digest(value) for path, value in _leaves(plain)}
    if streams:
        found["stream/torch"] = tensor_sha256(torch.default_generator.get_state())
    return found


def kept_digests(hooks: object, model: nn.Module) -> dict[str, str]:
    """sha256 of what a team's hooks keep beside the training that a resume has to bring back: loss scalers, averages of the model.

    Seen are attributes of the hooks object: torch's GradScaler ("plain/extra/hooks/NAME/scaler/scale"), modules that are no part of the
    trained model (an average, a teacher: "ema/hooks.NAME.fc.bias"), and what is called an average, there or inside of an object that is
    kept there: modules, tensors as large as their parameters by name or by place, all of them in one flat tensor, and counters beside
    them. Collective when sharded.
    """
    found: dict[str, str] = {}
    for attribute, value in sorted(getattr(hooks, "__dict__", {}).items()):
        if isinstance(value, torch.amp.GradScaler):
            leaves = _leaves(value.state_dict())
            found |= {"/".join(("plain", "extra", "hooks", attribute, "scaler", *path)): digest(leaf) for path, leaf in leaves}
    found |= {f"ema/{name}": tensor_sha256(whole(tensor)) for name, tensor in kept_averages(hooks, model).items()}
    holders = {kept.holder for kept in _kept(hooks, "hooks") if _averages(kept.value, model)}
    counters = (kept for kept in _kept(hooks, "hooks") if isinstance(kept.value, int) and kept.holder in holders)
    return found | {f"ema/{kept.place}": digest(kept.value) for kept in counters}


def kept_averages(hooks: object, model: nn.Module) -> dict[str, Tensor]:
    """Averages of the model that hooks keep, as `kept_digests` finds them: "hooks.PLACE.PARAMETER" -> tensor, not yet whole."""
    return {
        f"{kept.place}{name and '.'}{name}": tensor
        for kept in _kept(hooks, "hooks")
        for name, tensor in _averages(kept.value, model).items()
    }


class _Kept(NamedTuple):
    """A value that may be an average of the model, or count for one."""

    holder: str  # whose attribute it is
    place: str
    value: object


def _kept(holder: object, place: str, *, named: bool = False, depth: int = 1) -> Iterator[_Kept]:
    """Attributes that are called an average, and those of plain objects that are called one; on the hooks themselves every module."""
    for attribute, value in sorted(getattr(holder, "__dict__", {}).items()):
        here, is_named = f"{place}.{attribute}", named or any(word in attribute.lower() for word in AVERAGES)
        if isinstance(value, bool | str | type(None) | torch.amp.GradScaler):
            continue
        if isinstance(value, nn.Module | Tensor | Mapping | Sequence | int):
            if is_named or (depth and isinstance(value, nn.Module)):
                yield _Kept(place, here, value)
        elif depth and not callable(value):
            yield from _kept(value, here, named=is_named, depth=depth - 1)


def _averages(value: object, model: nn.Module) -> dict[str, Tensor]:
    """A module's tensors by name; other collections only where they have the parameters' shapes. {} for the trained model's own."""
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    if isinstance(value, nn.Module):
        tensors = dict([*value.named_parameters(), *value.named_buffers()])
    elif isinstance(value, Mapping):
        tensors = _by_name(value, parameters)
    elif isinstance(value, Tensor):
        is_whole = value.ndim == 1 and value.numel() == sum(parameter.numel() for parameter in parameters.values())
        tensors = {"": value} if is_whole else {}
    elif isinstance(value, Sequence):
        tensors = _by_place(value, parameters)
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {} if own & {id(tensor) for tensor in tensors.values()} else tensors


def _by_name(value: Mapping[Any, object], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Of a dictionary whose keys are parameters or their names, also as a wrapper has them. {} when some are others, or of other shapes."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, Tensor] = {}
    for key, tensor in value.items():
        name = WRAPPERS.sub("", key) if isinstance(key, str) else names.get(id(key), "")
        if name not in parameters or not isinstance(tensor, Tensor) or tensor.shape != parameters[name].shape:
            return {}
        found[name] = tensor
    return found


def _by_place(value: Sequence[object], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Of a list with a tensor for each parameter, or for each that trains, in their order. {} when it is none."""
    training = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    tensors = [tensor for tensor in value if isinstance(tensor, Tensor)]
    for wanted in (parameters, training):
        shapes = [parameter.shape for parameter in wanted.values()]
        if len(tensors) == len(value) and tensors and shapes == [tensor.shape for tensor in tensors]:
            return dict(zip(wanted, tensors, strict=True))
    return {}


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that is not a container, with its place; empty containers too. What trainer.state.to_plain packed is unpacked."""
    value = _unpacked(value)
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for place, item in enumerate(value):
            yield from _leaves(item, (*path, str(place)))
    else:
        yield path, value


def _unpacked(value: Any) -> Any:
    """{"~": "dict", "value": [[key, item], ...]} as a dictionary, {"~": "tuple", ...} as a list; other marked values stay whole."""
    if not (isinstance(value, Mapping) and set(value) >= {"~", "value"}):
        return value
    if value["~"] in ("dict", "counter"):
        return {key if isinstance(key, str | int) else str(key): item for key, item in value["value"]}
    return list(value["value"]) if value["~"] == "tuple" else str(value)
