"""What a resume lost, out of the names of a run's whole state that came back with other bytes."""

from collections.abc import Mapping
from typing import Literal

from validation.completeness import listed
from validation.diagnosis_kinds import Diagnosis, Kind

NARROW = 2.0**-5  # a relative change of a weight below this, in most tensors, is rounding to a narrower type; larger is another value
MOST = 0.5  # share of the tensors of a class from which on all of them count as hit


def diagnose_state(
    expected: Mapping[str, str],
    found: Mapping[str, str],
    *,
    when: Literal["loaded", "later"],
    changes: Mapping[str, float] | None = None,
) -> Diagnosis | None:
    """Say what was lost between two states of one training.

    Args: expected and found, sha256 by name (STATE_COLUMNS: "weight/fc.bias", "optimizer/fc.bias/exp_avg", "plain/groups/0/lr" ...), whole
        states; when, "loaded": what was saved against what a load brought back, "later": the twin's state against the resumed run's at the
        same step, the load itself having been right; changes, relative change of tensors where it is known.
    Returns: None when nothing differs.
    """
    differ = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if not differ:
        return None
    classes: dict[Kind, list[str]] = {}
    for name in differ:
        classes.setdefault(class_of(name), []).append(name)
    if when == "later":
        return _later(classes, differ)
    kind = next(kind for kind in ORDER if kind in classes)
    sure = _loaded(kind, classes[kind], expected, found, changes or {})
    others = [name for name in differ if name not in classes[kind]]
    return sure if not others else Diagnosis(kind=sure.kind, words=f"{sure.words}; besides, {_counted(others)} came back changed")


# Of several that differ the first one here is named, and the others are counted.
ORDER: tuple[Kind, ...] = (
    "averages", "weights", "moments", "step_count", "schedule", "loss_scale", "buffers", "random_streams", "position", "settings",
    "unknown",
)  # fmt: skip
_WORDS: Mapping[str, Kind] = {
    "schedule": "schedule", "lr": "schedule", "initial_lr": "schedule", "last_epoch": "schedule", "position": "position",
    "sampler": "position", "epoch": "position", "loader": "position", "scaler": "loss_scale", "scale": "loss_scale",
    "random": "random_streams", "rng": "random_streams", "generator": "random_streams", "stream": "random_streams",
    "streams": "random_streams", "ema": "averages", "step": "step_count",
}  # fmt: skip
_FIRST: Mapping[str, Kind] = {"weight": "weights", "buffer": "buffers", "ema": "averages"}


def class_of(name: str) -> Kind:
    """The part of a state that a name belongs to: by its first word, else by the first telling word in it."""
    first, *rest = name.split("/")
    if first in _FIRST:
        return _FIRST[first]
    if first == "optimizer":
        return "step_count" if rest and rest[-1] == "step" else "moments"
    if first == "plain" and rest[:1] == ["scalars"]:
        return "step_count" if rest[-1] == "step" else "moments"
    telling = next((_WORDS[word] for word in (first, *rest) if word in _WORDS), None)
    return telling or ("settings" if rest[:1] == ["groups"] else "unknown")


def _loaded(kind: Kind, names: list[str], expected: Mapping[str, str], found: Mapping[str, str], changes: Mapping[str, float]) -> Diagnosis:
    match kind:
        case "weights":
            return _weights(names, expected, found, changes)
        case "moments":
            return _moments(names, expected, found)
        case "averages":
            lost = all(name not in found for name in names)
            return Diagnosis(kind=kind, words=f"{_counted(names)} of the averaged weights {'are gone' if lost else 'came back changed'}")
        case _:
            return Diagnosis(kind=kind, words=f"{_counted(names)} came back changed")


def _weights(names: list[str], expected: Mapping[str, str], found: Mapping[str, str], changes: Mapping[str, float]) -> Diagnosis:
    averages = [
        name for name in names if found.get(name) is not None and found[name] == expected.get(f"ema/{name.removeprefix('weight/')}")
    ]
    if 2 * len(averages) > len(names):
        return Diagnosis(kind="averages_as_weights", words=f"{_counted(averages)} hold the averaged weights")
    known = [changes[name] for name in names if name in changes]
    if known and len(known) == len(names) and max(known) <= NARROW:
        return Diagnosis(kind="weights_rounded", words=f"{_counted(names)} came back changed by {max(known):.1e} at most, as by rounding")
    total = sum(name.startswith("weight/") for name in expected)
    gone = [name for name in names if name not in found]
    what = "are gone" if len(gone) == len(names) else "came back changed"
    return Diagnosis(kind="weights", words=f"{_counted(names)} of {total} weights {what}")


def _moments(names: list[str], expected: Mapping[str, str], found: Mapping[str, str]) -> Diagnosis:
    total = sum(class_of(name) == "moments" for name in expected)
    gone = [name for name in names if name not in found]
    if gone:
        return Diagnosis(kind="moments_lost", words=f"{len(gone)} of {total} optimizer moments are gone ({listed(gone)})")
    swapped = {name: other for name in names if (other := _owner(name, names, expected, found))}
    if swapped:
        name, other = next(iter(swapped.items()))
        return Diagnosis(kind="moments_swapped", words=f"{len(swapped)} moments are another tensor's: {name} holds what {other} was")
    if len(names) > MOST * total and (_alike(names, found) or len(names) == total):
        return Diagnosis(kind="moments_lost", words=f"{len(names)} of {total} optimizer moments were reset ({listed(names)})")
    return Diagnosis(kind="moments", words=f"{_counted(names)} of {total} optimizer moments came back changed")


def _owner(name: str, names: list[str], expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Whose saved moment a name holds now; "" when nobody's."""
    key = name.rpartition("/")[2]
    return next(
        (other for other in names if other != name and other.rpartition("/")[2] == key and expected.get(other) == found.get(name)), ""
    )


def _alike(names: list[str], found: Mapping[str, str]) -> bool:
    """Whether moments share their bytes with others, as empty ones of one shape do."""
    return len({found[name] for name in names}) < len(names)


def _later(classes: Mapping[Kind, list[str]], differ: list[str]) -> Diagnosis:
    """A run parts from its twin although the load was right: only a class that stands alone can be named."""
    if len(classes) == 1:
        kind, names = next(iter(classes.items()))
        alone: Kind = "not_in_state" if kind in ("weights", "moments", "unknown") else kind
        return Diagnosis(kind=alone, words=f"after a right load only {_counted(names)} part from the twin")
    if "position" in classes:
        return Diagnosis(kind="position", words=f"{_counted(classes['position'])} part from the twin, and {len(differ) - 1} more with it")
    if "schedule" in classes:
        return Diagnosis(kind="schedule", words=f"{_counted(classes['schedule'])} part from the twin, and the weights with them")
    return Diagnosis(kind="not_in_state", words=f"after a right load {_counted(differ)} part from the twin")


def _counted(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} entries ({listed(names)})"
