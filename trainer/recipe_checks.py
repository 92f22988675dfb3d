"""What a recipe has to look like: every member, asked without running any of them. Torch-free, but for a recipe that brings hooks."""

import difflib
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from trainer.recipe import SPLITS, Card, Column, DataContract, Training

MOST_WORKERS = 64  # loader processes of one rank

_METHODS = {
    "data": 1, "model": 0, "optimizer": 1, "schedule": 2, "loss": 2, "scorer": 1, "baseline": 1, "rule": 1, "outcomes": 2, "quality": 2,
}  # fmt: skip
_VALUES: Mapping[str, tuple[type, ...]] = {
    "name": (str,), "card": (Card,), "training": (Training,), "contract": (DataContract,), "slices": (list, tuple), "cluster": (str,),
    "target_quality": (int, float),
}  # fmt: skip


_CHOICES = {"tail": ("keep", "drop"), "autocast": ("", "bfloat16", "float16")}
_OPTIONAL = {"state_dict": 0, "load_state_dict": 1, "shard_units": 1}
_STATE = ("state_dict", "load_state_dict")


def problems_of(recipe: Any) -> Iterator[str]:
    """All that is wrong with what a team brings as a recipe, in words."""
    if isinstance(recipe, type):
        yield f"it is the class {recipe.__name__}, name an instance of it"
        return
    for name, arguments in _METHODS.items():
        yield from _method_problems(getattr(recipe, name, None), name, arguments)
    for name in (name for name in _OPTIONAL if hasattr(recipe, name)):
        yield from _method_problems(getattr(recipe, name), name, _OPTIONAL[name])
    yield from _hooks_problems(getattr(recipe, "hooks", None))
    yield from _excludes_problems(getattr(recipe, "excludes", {}))
    if len(absent := [name for name in _STATE if not hasattr(recipe, name)]) == 1:
        yield f"{absent[0]}() is missing: a state that changes has to be both saved and loaded"
    wrong = [name for name, kinds in _VALUES.items() if not isinstance(getattr(recipe, name, None), kinds)]
    for name in wrong:
        kind = _VALUES[name][-1].__name__
        yield f"{name} is {'a ' + type(getattr(recipe, name)).__name__ if hasattr(recipe, name) else 'missing'}, it has to be a {kind}"
    for name, check in (("name", _name_problems), ("training", _training_problems), ("contract", _contract_problems)):
        if name not in wrong:
            yield from check(getattr(recipe, name))
    if not {"slices", "cluster", "target_quality"} & set(wrong):
        yield from _judging_problems(recipe)
    if hasattr(recipe, "live_period") and "contract" not in wrong:
        yield from _live_problems(recipe.live_period, recipe.contract)


def _method_problems(method: Any, name: str, arguments: int) -> Iterator[str]:
    if not callable(method):
        yield f"{name}() is missing" if method is None else f"{name} is a {type(method).__name__}, it has to be a function"
        return
    try:
        inspect.signature(method).bind(*range(arguments))
    except TypeError:
        yield f"{name}{inspect.signature(method)} does not take {arguments} argument{'' if arguments == 1 else 's'}"
    except ValueError:  # a builtin without a signature: nothing can be told before it is called
        return


def _hooks_problems(hooks: Any) -> Iterator[str]:
    """What is wrong with the parts of the trainer that a recipe brings; None brings nothing."""
    if hooks is None:
        return
    from trainer.hooks import Hooks, brought  # torch, which a recipe with hooks has imported itself

    if not isinstance(hooks, Hooks):
        kind = f"the class {hooks.__name__}" if isinstance(hooks, type) else f"a {type(hooks).__name__}"
        yield f"hooks is {kind}, it has to be an instance of a subclass of trainer.hooks.Hooks"
        return
    own = brought(hooks)
    for name in own:
        yield from _method_problems(getattr(hooks, name), f"hooks.{name}", len(inspect.signature(getattr(Hooks, name)).parameters) - 1)
    if len(absent := [name for name in ("save", "load") if name not in own]) == 1:
        yield f"hooks.{absent[0]}() is missing: a run that saves its own way has to load its own way, too"
    known = set(dir(Hooks))
    for name in sorted(name for name, value in vars(type(hooks)).items() if callable(value) and not name.startswith("_")):
        if name not in known and (alike := difflib.get_close_matches(name, known, 1, 0.8)):
            yield f"hooks.{name}() is no hook and would never be called (did you mean {alike[0]}()?)"


def _excludes_problems(excludes: Any) -> Iterator[str]:
    if not isinstance(excludes, Mapping) or not all(isinstance(part, str) and part for pair in excludes.items() for part in pair):
        yield "excludes has to map names of hard conditions to reasons, both in words"


def _name_problems(name: str) -> Iterator[str]:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,59}", name):
        yield f"name '{name[:80]}' has to match [a-z0-9-]+ and have at most 60 characters"


def _training_problems(training: Training) -> Iterator[str]:
    for name in ("global_batch_size", "epochs", "lanes", "evaluate_every", "accumulation"):
        value = getattr(training, name)
        if type(value) is not int or value < 1:
            yield f"training.{name} is {value!r}, it has to be a whole number of at least 1"
            return
    if training.lanes & (training.lanes - 1):
        yield f"training.lanes is {training.lanes}, it has to be a power of two"
    if training.global_batch_size < training.lanes:
        yield f"training.global_batch_size is {training.global_batch_size}, fewer than its {training.lanes} lanes"
    if type(training.seed) is not int or not 0 <= training.seed < 2**63:
        yield f"training.seed is {training.seed!r}, it has to be a whole number from 0 to 2**63 - 1"
    if training.clip_norm is not None and not training.clip_norm > 0:
        yield f"training.clip_norm is {training.clip_norm!r}, it has to be positive or None"
    if type(training.loader_workers) is not int or not 0 <= training.loader_workers <= MOST_WORKERS:
        yield f"training.loader_workers is {training.loader_workers!r}, it has to be a whole number from 0 to {MOST_WORKERS}"
    for name in ("tail", "autocast"):
        allowed = _CHOICES[name]
        if getattr(training, name) not in allowed:
            yield f"training.{name} is {getattr(training, name)!r}, it has to be one of {', '.join(map(repr, allowed))}"
    yield from _precision_problems(training)


def _precision_problems(training: Training) -> Iterator[str]:
    scale, decay = training.loss_scale, training.ema_decay
    if scale is not None and not (_is_number(scale) and 0 < scale < math.inf):
        yield f"training.loss_scale is {scale!r}, it has to be positive and finite, or None"
    elif scale is not None and training.autocast != "float16":
        yield f"training.loss_scale is {scale!r} with autocast {training.autocast!r}: only 'float16' needs a scaled loss"
    if decay is not None and not (_is_number(decay) and 0 < decay < 1):
        yield f"training.ema_decay is {decay!r}, it has to lie between 0 and 1, or be None"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _judging_problems(recipe: Any) -> Iterator[str]:
    if not recipe.slices or not all(isinstance(name, str) and name for name in recipe.slices):
        yield "slices has to name at least one column of the frame"
    elif len(set(recipe.slices)) < len(recipe.slices):
        yield "slices names a column twice"
    if not recipe.cluster:
        yield "cluster has to name a column of the frame"
    if not math.isfinite(recipe.target_quality):
        yield f"target_quality is {recipe.target_quality}, it has to be finite"


def _contract_problems(contract: DataContract) -> Iterator[str]:
    if not contract.columns:
        yield "contract.columns is empty: the model would see nothing"
    late = sorted(set(contract.columns) & {*contract.known_after_cutoff, contract.label})
    if late:
        yield f"contract.columns holds {', '.join(late)}, known only after the decision"
    for name, column in contract.columns.items():
        yield from _column_problems(name, column)
    for field_name in ("label", "event_time"):
        if not getattr(contract, field_name):
            yield f"contract.{field_name} has to name a column of the frame"
    for split in SPLITS:
        if not contract.min_rows.get(split, 0) >= 1:
            yield f"contract.min_rows['{split}'] has to be at least 1"
    yield from _period_problems(contract.period)
    if not contract.max_gap_days > 0:
        yield f"contract.max_gap_days is {contract.max_gap_days}, it has to be positive"


def _column_problems(name: str, column: Any) -> Iterator[str]:
    if not isinstance(column, Column) or column.kind not in ("number", "category", "time"):
        yield f"contract.columns['{name}'] has to be a Column of kind number, category or time"
        return
    if not 0 <= column.max_null_share <= 1:
        yield f"contract.columns['{name}'].max_null_share is {column.max_null_share}, outside 0..1"
    if column.minimum is not None and column.maximum is not None and not column.minimum <= column.maximum:
        yield f"contract.columns['{name}'] allows nothing: {column.minimum}..{column.maximum}"


def _period_problems(period: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    try:
        spans = {split: (datetime.fromisoformat(period[split][0]), datetime.fromisoformat(period[split][1])) for split in SPLITS}
        ordered = all(first < last for first, last in spans.values()) and spans["train"][1] <= spans["judge"][0]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        yield f"contract.period needs (first, last) ISO times for train and judge ({error!r})"
        return
    if not ordered:
        yield "contract.period: each split has to start before it ends, and train has to end before judge starts"


def _live_problems(period: Any, contract: DataContract) -> Iterator[str]:
    """What is wrong with when a live split is of; requests that were judged by are no news of a version in service."""
    try:
        first, last = period
        begins = datetime.fromisoformat(first)
        ends = datetime.fromisoformat(last) if last else datetime.max.replace(tzinfo=begins.tzinfo)
        judged = datetime.fromisoformat(contract.period["judge"][1])
        ordered = judged <= begins < ends
    except (KeyError, IndexError, TypeError, ValueError) as error:
        yield f'live_period has to be (first, last) ISO times, last "" when it goes on ({error!r})'
        return
    if not ordered:
        after = contract.period["judge"][1]
        yield f"live_period {first} to {last or 'now'} has to begin after the judge split's end ({after}) and end later"
