"""Sort wrong samples, shared random streams and wrong learning rates into kinds."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from validation.completeness import listed
from validation.diagnosis_kinds import Diagnosis

CLOSE = 1e-9  # relative: learning rates within it are the same; a schedule that is wrong by a step is off by 1e-4 and more


class Draw(NamedTuple):
    """Who drew random numbers, and when."""

    rank: int
    step: int


def diagnose_samples(
    found: Mapping[int, Sequence[int]], expected: Sequence[int], *, elsewhere: frozenset[int] = frozenset()
) -> Diagnosis | None:
    """Say how one step's samples are wrong; None when they are right.

    Args: found, rank -> sample ids in any order; expected, the whole step's; elsewhere, ids that are expected in other steps.
    """
    taken, wanted = Counter(sample for samples in found.values() for sample in samples), Counter(expected)
    surplus, lacking = sorted((taken - wanted).elements()), sorted((wanted - taken).elements())
    if not surplus and not lacking:
        return None
    what = "; ".join([*_named("repeated or foreign", surplus), *_named("missing", lacking)])
    shares = [Counter(samples) for samples in found.values() if samples]
    if len(shares) > 1 and all(share == shares[0] for share in shares) and lacking:
        return Diagnosis(kind="not_split", words=f"all {len(shares)} ranks consumed the same samples ({what})")
    if surplus and lacking and _is_shared(found, surplus):
        return Diagnosis(kind="rank_order", words=f"ranks took their shares out of different orders, which overlap ({what})")
    if surplus and lacking and set(surplus) <= elsewhere:
        return Diagnosis(kind="order", words=f"samples of other steps were consumed in this one ({what})")
    if surplus and lacking:
        return Diagnosis(kind="samples", words=f"other samples were consumed ({what})")
    how = "filled up with repeats" if surplus else "cut short"
    return Diagnosis(kind="padding", words=f"the step was {how} ({what})")


def _is_shared(found: Mapping[int, Sequence[int]], surplus: Sequence[int]) -> bool:
    """Whether some surplus sample was consumed on two ranks."""
    ranks = Counter(sample for samples in found.values() for sample in set(samples))
    return any(ranks[sample] > 1 for sample in surplus)


def _named(what: str, samples: Sequence[int]) -> list[str]:
    return [f"{what}: {listed(samples)}"] if samples else []


def diagnose_draws(one: Draw, other: Draw, drawer: str, generator: str) -> Diagnosis:
    """Name who shares a random stream: the two first draws that found `generator` in one state."""
    whose = {"model": "forward passes (dropout)", "data": "fetches (augmentation)"}.get(drawer, drawer)
    if one.rank != other.rank and one.step == other.step:
        how = f"ranks {one.rank} and {other.rank} draw the same numbers in step {one.step}: they were seeded alike"
    elif one.rank != other.rank:
        how = f"rank {other.rank} draws in step {other.step} what rank {one.rank} drew in step {one.step}"
    elif one.step != other.step:
        how = f"rank {one.rank} draws in step {other.step} what it drew in step {one.step}: the stream starts over with a step or an epoch"
    else:
        how = f"rank {one.rank} draws the same numbers twice in step {one.step}: its workers or micro-batches were seeded alike"
    return Diagnosis(kind="streams", words=f"{whose}, generator {generator}: {how}")


Rates = Sequence[Sequence[float]]  # by step, then by optimizer group


def same_rates(found: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether two steps have the same learning rates, by group."""
    return len(found) == len(expected) and all(math.isclose(a, b, rel_tol=CLOSE) for a, b in zip(found, expected, strict=True))


_PATHS: tuple[tuple[str, Callable[[int, int], int]], ...] = (  # what is wrong, (step, world size) -> the step whose rates are used
    ("the schedule steps once per rank in every update", lambda step, size: step * size),
    ("the schedule is one update ahead", lambda step, _size: step + 1),
    ("the schedule is one update behind", lambda step, _size: max(0, step - 1)),
    ("the schedule never steps", lambda _step, _size: 0),
)


def diagnose_rates(found: Rates, expected: Rates, world_size: int, micro_batches: int = 1) -> Diagnosis:
    """Say how learning rates are wrong. Args: both by step, from step 0 on; micro_batches, of a rank in one step."""
    read = ((rates, right) for rates, right in zip(found, expected, strict=False) if not any(map(math.isnan, (*rates, *right))))
    counts = next(((len(rates), len(right)) for rates, right in read if len(rates) != len(right)), None)
    if counts is not None:
        words = (
            f"the optimizer has {counts[0]} parameter group(s) and that of one process {counts[1]}: parameters were sorted into other ones"
        )
        return Diagnosis(kind="update", words=words)
    paths = [*_PATHS]
    if micro_batches > 1:
        each = (f"the schedule steps once per micro-batch, {micro_batches} times in every update", lambda step, _size: step * micro_batches)
        paths = [*paths, each] if world_size > 1 and micro_batches == world_size else [each, *paths]
    for words, path in paths:
        pairs = [(rates, expected[at]) for step, rates in enumerate(found) if (at := path(step, world_size)) < len(expected)]
        tells = len({tuple(right) for _, right in pairs}) > 1 or path(1, world_size) == 0
        if len(pairs) > 1 and tells and all(same_rates(rates, right) for rates, right in pairs):
            return Diagnosis(kind="rates", words=words)
    factors = [a / b for rates, right in zip(found, expected, strict=False) for a, b in zip(rates, right, strict=False) if b]
    if factors and not math.isclose(factors[0], 1.0) and all(math.isclose(factor, factors[0], rel_tol=1e-6) for factor in factors):
        named = " = W" if math.isclose(factors[0], world_size) and world_size > 1 else ""
        return Diagnosis(kind="rates", words=f"every learning rate is multiplied by {factors[0]:.4g}{named}")
    pairs = list(zip(found, expected, strict=False))
    first = next((step for step, (rates, right) in enumerate(pairs) if not same_rates(rates, right)), 0)
    since = f": equal to the schedule's up to step {first - 1}" if first else ""
    return Diagnosis(kind="rates", words=f"learning rates follow another schedule{since}")
