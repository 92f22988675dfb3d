"""Clean records of gradient_equivalence, for a trainer that is all ours and for a brought one; a test names what it changes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from validation.canonical import canonical_json, sha256_hex
from validation.equivalence_legs import LEGS, required_legs
from validation.policy import parse_policy
from validation.records import (
    COLLECTIVE_COLUMNS,
    CONSUMED_COLUMNS,
    DIGEST_COLUMNS,
    EXPECTED_COLUMNS,
    GRADIENT_ERROR_COLUMNS,
    LEDGER_COLUMNS,
    SLOPE_COLUMNS,
    STREAM_COLUMNS,
    UPDATE_COLUMNS,
    Condition,
    EquivalenceRecords,
    EvaluationCount,
    Leg,
)

POLICY = parse_policy("gradient_equivalence: {soak_repeats: 5}").gradient_equivalence
OWN = ("gradients",)  # hooks of a brought trainer
SIZES = (1, 2, 4)
STEPS, BATCH, SAMPLES = 6, 8, 20  # two and a half epochs
TENSORS = ("body.bias", "body.weight", "head.weight")
BUFFER = "norm.running_mean"
NOISE = {"float32": 2e-7, "float64": 4e-16}
RATES = tuple(canonical_json([rate]).decode() for rate in (0.1, 0.1, 0.1, 0.05, 0.05, 0.025))
CONDITIONS = tuple(Condition(name=name, held=True, detail="set") for name in ("clipping", "dropout", "accumulation", "spike", "overflow"))
POISONED = 3  # step
ORDER = tuple(
    int(sample)
    for epoch in range(STEPS * BATCH // SAMPLES + 1)
    for sample in 100 + np.random.default_rng(epoch).permutation(SAMPLES)
)[: STEPS * BATCH]  # fmt: skip


def bits(*words: object) -> str:
    """A digest that depends on these words alone."""
    return sha256_hex(repr(words).encode())


def frame(rows: Sequence[tuple[Any, ...]], columns: Sequence[str]) -> pd.DataFrame:
    """A table."""
    return pd.DataFrame(rows, columns=list(columns))


def share(step: int, rank: int, size: int) -> tuple[int, ...]:
    """Sample ids that a rank takes of a step."""
    return ORDER[step * BATCH : (step + 1) * BATCH][rank::size]


def leg(name: str, size: int, *, own: bool = False, **changes: Any) -> Leg:
    """A clean leg; its tables are shared, so copy before writing into one."""
    return replace(_clean_leg(name, size, own), **changes)


@cache
def _clean_leg(name: str, size: int, own: bool) -> Leg:
    precision = "float64" if name in ("logic", "unclipped") else "float32"
    salt = size if own else 0  # an own reduction has other bits at other world sizes
    ranks = [(step, rank) for step in range(STEPS) for rank in range(size)]
    stages = [("reduced", TENSORS), ("clipped", TENSORS), ("weight", TENSORS), ("buffer", (BUFFER,))]
    digests = [
        (size, rank, step, stage, tensor, bits(name, salt, step, stage, tensor))
        for step, rank in ranks for stage, tensors in stages for tensor in tensors
    ]  # fmt: skip
    if name == "soak":
        digests += [(size, rank, r, "again", tensor, bits(salt, tensor)) for r in range(5) for rank in range(size) for tensor in TENSORS]
    consumed = [
        (rank, step, number % 2, sample, f"c{sample}", name in ("spike", "overflow") and step == POISONED and rank == 0 and number % 2 == 0)
        for step, rank in ranks for number, sample in enumerate(share(step, rank, size))
    ]  # fmt: skip
    ledger = [
        (step, rank, step * BATCH + rank + number * size, sample)
        for step, rank in ranks
        for number, sample in enumerate(share(step, rank, size))
    ]
    streams = [(rank, step, drawer, "torch", bits(rank, step, drawer)[:16]) for step, rank in ranks for drawer in ("model", "data")]
    given: dict[str, Any] = {
        "name": name, "world_size": size, "parallel": "ddp", "reduction": "own" if own else "fast" if name == "fast" else "exact",
        "precision": precision, "states": (bits(name, salt),) * size,
        "ledger": frame(ledger, LEDGER_COLUMNS).astype("int64"), "digests": frame(digests, DIGEST_COLUMNS),
        "consumed": frame(consumed, CONSUMED_COLUMNS), "streams": frame(streams, STREAM_COLUMNS),
        "updates": frame([(rank, step, RATES[step], 0.5, 0.5, 1.0, "[]", 3.0, 0.7) for step, rank in ranks], UPDATE_COLUMNS),
        "collectives": frame([(rank, "all_reduce", precision, 6, 600) for rank in range(size)], COLLECTIVE_COLUMNS),
    }  # fmt: skip
    if name == "overflow":
        given["stopped"] = "rank 0: the loss is infinite in step 3"
    return Leg(**given)


def errors(brought: Sequence[str] = (), in_noise: float = 1.0, legs: Sequence[tuple[str, int]] | None = None) -> pd.DataFrame:
    """Every tensor of every compared leg, stage and step `in_noise` times its noise away."""
    wanted = [(name, size) for name, size in required_legs(brought, SIZES) if LEGS[name].compared] if legs is None else legs
    stages = ("clipped", "weight") if "step" in brought else ("reduced", "clipped", "weight")
    noise = {name: NOISE["float64" if name in ("logic", "unclipped") else "float32"] for name, _ in wanted}
    return frame(
        [
            (name, size, step, stage, tensor, in_noise * noise[name], noise[name], 1.0)
            for name, size in wanted for step in range(STEPS) for stage in stages for tensor in TENSORS
        ],
        GRADIENT_ERROR_COLUMNS,
    )  # fmt: skip


def records(brought: Sequence[str] = (), **changes: Any) -> EquivalenceRecords:
    """A clean run of a trainer with these brought hooks."""
    own = any(name not in ("evaluate", "save", "load") for name in brought)
    planted = errors(legs=(("training", 2),)).assign(rel_err=0.5, scale=0.5)
    judged = tuple(range(500, 521))
    evaluations = tuple(EvaluationCount(world_size=w, sample_ids=judged, quality=0.7, plain_quality=0.7) for w in SIZES)
    given: dict[str, Any] = {
        "world_sizes": SIZES, "brought": tuple(brought), "conditions": CONDITIONS, "steps": STEPS,
        "legs": tuple(leg(name, size, own=own) for name, size in required_legs(brought, SIZES)),
        "expected": frame([(p // BATCH, sample, f"c{sample}") for p, sample in enumerate(ORDER)], EXPECTED_COLUMNS),
        "expected_order": () if own else ORDER, "expected_rates": RATES, "frozen": (), "errors": errors(brought),
        "slopes": frame([(name, 1.0, 1.0 + 1e-9, 1e-9) for name in TENSORS], SLOPE_COLUMNS), "slopes_excluded": "",
        "judged_ids": judged if "evaluate" in brought else (), "evaluations": evaluations if "evaluate" in brought else (),
        "planted_defect": "the gradient divided by the world size once more", "planted_errors": planted, "worker_seconds": 30.0,
        "plain_seconds": 1.5,
    }  # fmt: skip
    return EquivalenceRecords(**{**given, **changes})


def with_leg(made: EquivalenceRecords, name: str, size: int, **changes: Any) -> EquivalenceRecords:
    """The records with one leg changed; a callable makes a field's new value out of the old one."""
    return replace(
        made,
        legs=tuple(_changed_leg(found, changes) if (found.name, found.world_size) == (name, size) else found for found in made.legs),
    )


def with_legs(made: EquivalenceRecords, name: str, **changes: Any) -> EquivalenceRecords:
    """The records with all legs of a name changed."""
    for size in {found.world_size for found in made.legs if found.name == name}:
        made = with_leg(made, name, size, **changes)
    return made


def without_leg(made: EquivalenceRecords, name: str, size: int) -> EquivalenceRecords:
    """The records without one leg."""
    return replace(made, legs=tuple(found for found in made.legs if (found.name, found.world_size) != (name, size)))


def _changed_leg(found: Leg, changes: dict[str, Any]) -> Leg:
    return replace(found, **{key: value(getattr(found, key)) if isinstance(value, Callable) else value for key, value in changes.items()})  # type: ignore[arg-type]


def changed(table: pd.DataFrame, column: str, value: Any, **where: Any) -> pd.DataFrame:
    """A copy with `column` set to `value` in the rows that match; a set or list matches each of its members."""
    copy = table.copy()
    picks = [
        table[name].isin(wanted) if isinstance(wanted, (set, list, tuple)) else table[name] == wanted for name, wanted in where.items()
    ]
    copy.loc[np.logical_and.reduce(picks) if picks else slice(None), column] = value
    return copy


def change(column: str, value: Any, **where: Any) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """`changed` as a function of the table, for `with_leg`."""
    return lambda table: changed(table, column, value, **where)
