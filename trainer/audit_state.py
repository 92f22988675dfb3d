"""A rank's whole state as one digest a name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.parallel import whole
from trainer.state import State, tensor_sha256
from validation.canonical import digest

AVERAGES = ("ema", "average", "avg", "shadow")  # what people call averaged weights


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
    trained model (an average, a teacher: "ema/hooks.NAME.fc.bias"), and tensors by parameter name in a dictionary called an average.
    """
    found: dict[str, str] = {}
    own = {id(value) for value in (*model.parameters(), *model.buffers())}
    parameters = {name for name, _ in model.named_parameters()}
    for attribute, value in sorted(getattr(hooks, "__dict__", {}).items()):
        if isinstance(value, torch.amp.GradScaler):
            leaves = _leaves(value.state_dict())
            found |= {"/".join(("plain", "extra", "hooks", attribute, "scaler", *path)): digest(leaf) for path, leaf in leaves}
            continue
        tensors = _averages(attribute, value, parameters)
        if tensors and not own & {id(tensor) for tensor in tensors.values()}:
            found |= {f"ema/hooks.{attribute}.{name}": tensor_sha256(whole(tensor)) for name, tensor in tensors.items()}
    return found


def _averages(attribute: str, value: object, parameters: set[str]) -> dict[str, Tensor]:
    """Tensors of a module by name, or of a dictionary that is named an average and whose keys are parameters' names."""
    if isinstance(value, nn.Module):
        return dict([*value.named_parameters(), *value.named_buffers()])
    is_named = any(word in attribute.lower() for word in AVERAGES)
    if not (is_named and isinstance(value, Mapping) and value and value.keys() <= parameters):
        return {}
    return {name: tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}


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
