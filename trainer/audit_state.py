"""A rank's whole state as one digest a name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer.parallel import whole
from trainer.state import State, tensor_sha256
from validation.canonical import digest


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
