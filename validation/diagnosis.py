"""Sort a first divergence from the reference into a kind, from its signature alone: which tensors, by how much, where and where not.

`diagnose` is for errors against the float64 reference; validation/diagnosis_ranks.py compares ranks and world sizes bit for bit,
diagnosis_data.py samples, streams and rates, diagnosis_state.py what a resume lost. The kinds stand in diagnosis_kinds.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from validation.completeness import listed
from validation.diagnosis_kinds import Diagnosis, Kind

GRADIENTS = ("reduced", "clipped")
STAGE_WORDS = {
    "reduced": "gradient before clipping", "clipped": "gradient handed to the optimizer", "weight": "update", "buffer": "buffer",
    "again": "gradient computed again",
}  # fmt: skip
SAME = 0.01  # relative spread below which tensors count as off by one factor; float32 noise is 1e-7, bfloat16's 2e-2
RESIDUE = 0.1  # share of an error that may not lie along the right value when the error is called a factor
AGREEING = 0.9  # share of the wrong tensors that has to show the factor: a tensor of pure noise shows anything
ROUNDING = 0.05  # rounding to bfloat16 leaves less (2**-8 an element, summed over a few ranks); logic faults leave more in some tensor
EVEN = 30.0  # rounding hits all tensors alike: largest over smallest error; measured below 3 for float16 and bfloat16
PLAINLY_EVEN = 4.0  # the same where nothing else tells of a narrow type
ALONG = 0.2  # share of a rounding error that lies along the right value, at most, in the middle tensor: 1/sqrt(elements) for random ones


class TensorError(NamedTuple):
    """How far one tensor is from the reference (GRADIENT_ERROR_COLUMNS)."""

    tensor: str
    rel_err: float
    scale: float  # share of the right value in it: 1 when right
    in_noise: float  # rel_err / noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One leg's first divergence from the reference."""

    leg: str
    step: int
    stage: str  # "reduced" | "clipped" | "weight"
    found: Mapping[int, tuple[TensorError, ...]]  # world size -> tensors beyond the limit, at least one each
    clean_sizes: tuple[int, ...]  # world sizes measured there that are within the limit
    total: int  # tensors measured there
    clean_stages: tuple[str, ...]  # earlier stages of this step, measured and within the limit at these world sizes
    clean_legs: tuple[str, ...]  # other legs that are within the limit at the widest of these world sizes, this step and this stage
    micro_batches: Mapping[int, int] = field(default_factory=dict)  # world size -> micro-batches a rank makes in one step
    rates_differ: bool = False  # learning rates are not the reference's
    narrow: tuple[str, ...] = ()  # types narrower than the leg's own that its collectives carried

    @property
    def world_size(self) -> int:
        """The widest one that diverges."""
        return max(self.found)

    @property
    def tensors(self) -> tuple[TensorError, ...]:
        """What diverges there."""
        return self.found[self.world_size]


def diagnose(divergence: Divergence) -> Diagnosis:
    """Name the kind of a divergence from the reference; never raises on odd numbers."""
    broken = [row.tensor for row in divergence.tensors if not math.isfinite(row.rel_err) or math.isnan(row.in_noise)]
    if broken:
        return _said("not_a_number", divergence, f"not a number in {listed(broken)}")
    if divergence.leg == "spike" and "logic" in divergence.clean_legs:
        words = (
            "right without the bad micro-batch and wrong with it: a rank left it, or itself, out of a step that all made, or what all "
            "skipped is in a later gradient"
        )
        return _said("poison", divergence, f"{words}; {_amounts(divergence.tensors, divergence.total)}")
    if divergence.leg in ("training", "fast") and (found := _against_logic(divergence)):
        return found
    if divergence.stage == "weight":
        return _update(divergence)
    if "reduced" in divergence.clean_stages or (divergence.leg != "unclipped" and "unclipped" in divergence.clean_legs):
        return _clipping(divergence)
    return _gradient(divergence)


def _against_logic(divergence: Divergence) -> Diagnosis | None:
    """What a float32 leg says beside a float64 leg that is clean there; None where that one is not, or was not held."""
    if divergence.leg == "fast" and "training" in divergence.clean_legs:
        return _said("torch_reduction", divergence, f"only torch's own reduction is off: {_amounts(divergence.tensors, divergence.total)}")
    if "logic" not in divergence.clean_legs:
        return None
    factor = uniform_factor(divergence.tensors)
    if factor is not None and abs(factor - 1) > SAME and _most(divergence):
        return None
    size = f", the size of {type_of_rounding(divergence.tensors)} rounding" if is_rounding(divergence.tensors, divergence.total) else ""
    words = f"the float64 leg is clean, so this is no fault of logic: {_amounts(divergence.tensors, divergence.total)}{size}"
    return _said("precision", divergence, words)


def _gradient(divergence: Divergence) -> Diagnosis:
    tensors, factor = divergence.tensors, uniform_factor(divergence.tensors)
    if not _most(divergence):
        return _said("some_tensors", divergence, _few(divergence, factor))
    if factor is not None and abs(factor) <= SAME:
        return _said("no_gradient", divergence, f"{_share(divergence)} zero where the reference has a gradient")
    if factor is not None:
        return _said("factor", divergence, f"{_share(divergence)} off by the same factor {factor:.4g}{named_factor(divergence)}")
    if _is_narrow(divergence):
        kind = type_of_rounding(tensors)
        return _said("precision", divergence, f"{_amounts(tensors, divergence.total)}, without a direction: the size of {kind} rounding")
    if "training" in divergence.clean_legs and divergence.step == 0 and divergence.leg in ("logic", "unclipped"):
        words = "the gradient is right for the weights the run had, and these were not the reference's before the first update"
        return _said("initial_weights", divergence, words)
    since = f", and right before step {divergence.step}" if divergence.step else ""
    if 1 not in divergence.found and divergence.world_size > 1:
        words = "ranks are normalised, clipped or computed each for itself, or one rank's gradient stands for all"
        words += ", or the gradient is that of the update before" if since else ""
        return _said("per_rank", divergence, f"{_amounts(tensors, divergence.total)}{since}: {words}")
    if since:
        return _said("leftover", divergence, f"{_amounts(tensors, divergence.total)}{since}: an update leaves the next one something")
    if divergence.micro_batches.get(1, 1) > 1:
        words = "micro-batches are normalised or clipped each for itself"
        return _said("per_micro_batch", divergence, f"{_amounts(tensors, divergence.total)}: {words}")
    return _said("every_size", divergence, f"{_amounts(tensors, divergence.total)}: the step computes another loss than the recipe's")


def _clipping(divergence: Divergence) -> Diagnosis:
    factor = uniform_factor(divergence.tensors)
    if "reduced" in divergence.clean_stages and not _most(divergence) and not any(map(_is_multiple, divergence.tensors)):
        words = (
            "the gradient is right before clipping, and what the optimizer was handed is no multiple of it: something was added to these"
        )
        return _said("update", divergence, f"{words}, a decay, say: {_few(divergence, None)}")
    if factor is not None and _most(divergence):
        how = (
            f"{_share(divergence)} off by the same factor {factor:.4g}{named_factor(divergence)}: the norm is not the whole mean gradient's"
        )
    else:
        how = f"{_amounts(divergence.tensors, divergence.total)}: tensors, micro-batches or ranks are clipped each for itself"
    return _said("clipping", divergence, f"right before clipping and wrong after it: {how}")


def _update(divergence: Divergence) -> Diagnosis:
    tensors, factor = divergence.tensors, uniform_factor(divergence.tensors)
    if divergence.rates_differ:
        return _said("rates", divergence, "the gradients are right and the learning rates are not the reference's")
    if factor is not None and abs(factor) <= SAME and _most(divergence):
        return _said("nothing_moves", divergence, f"the gradients are right, and {_share(divergence)} not changed by the update")
    if factor is not None and _most(divergence):
        how = f"{_share(divergence)} off by the same factor {factor:.4g}{named_factor(divergence)}"
    elif is_rounding(tensors, divergence.total):
        how = (
            f"{_amounts(tensors, divergence.total)}, the size of {type_of_rounding(tensors)} rounding: weights are kept in a narrower type"
        )
    else:
        how = _amounts(tensors, divergence.total) if _most(divergence) else _few(divergence, factor)
    return _said("update", divergence, f"the gradients are right and the update is not: {how}")


# The parts of a signature


def uniform_factor(tensors: Sequence[TensorError]) -> float | None:
    """The one factor by which tensors are off, 0 when they are zero; None when each is off by its own amount."""
    scales = [row.scale for row in tensors if math.isfinite(row.scale)]
    if not scales:
        return None
    factor = median(scales)
    agreeing = sum(_is_scaled(row, factor) for row in tensors)
    return factor if agreeing >= AGREEING * len(tensors) and abs(factor - 1) > 0 else None


def _is_scaled(row: TensorError, factor: float) -> bool:
    """Whether a tensor is `factor` times the right one, float noise aside."""
    off = abs(row.scale - 1)
    residue = math.sqrt(max(0.0, (row.rel_err - off) * (row.rel_err + off)))  # a power of a huge number raises, a product does not
    spread = SAME * min(1.0, max(abs(factor), SAME), 10 * abs(factor - 1))  # a factor of 1.01 has to be told from one of 1.001
    return abs(row.scale - factor) <= spread and residue <= RESIDUE * off


def _is_multiple(row: TensorError) -> bool:
    """Whether a tensor is some multiple of the right one, as anything that clips a whole tensor leaves it."""
    return _is_scaled(row, row.scale)


def named_factor(divergence: Divergence) -> str:
    """Say which number of ranks or micro-batches the factor is, at every measured world size: " = 1/W: ..."; "" when none."""
    factors = {size: uniform_factor(rows) for size, rows in divergence.found.items()} | dict.fromkeys(divergence.clean_sizes, 1.0)
    counts = {size: divergence.micro_batches.get(size, 1) for size in factors}
    named = []
    for factor in _FACTORS:
        says_nothing = (factor.ranks != 0 and set(factors) == {1}) or (factor.micro_batches != 0 and set(counts.values()) == {1})
        values = {size: float(size**factor.ranks * counts[size] ** factor.micro_batches) for size in factors}
        if not says_nothing and all(_is_near(factors[size], value) for size, value in values.items()):
            named.append(f"{factor.name}: {factor.words}")
    return f" = {', or '.join(named)}" if named else ""


def _is_near(factor: float | None, value: float) -> bool:
    return factor is not None and abs(factor - value) <= SAME * value


class _Factor(NamedTuple):
    name: str
    words: str
    ranks: float  # power of the world size
    micro_batches: float  # power of the number of micro-batches


_FACTORS = (
    _Factor("1/W", "divided by the world size once too often", -1, 0),
    _Factor("W", "multiplied by the world size once too often, or summed over ranks where a mean was meant", 1, 0),
    _Factor("1/A", "divided by the number of micro-batches once too often", 0, -1),
    _Factor("A", "the micro-batches' means were summed where their mean was meant", 0, 1),
    _Factor("1/(W*A)", "divided by ranks and micro-batches once too often", -1, -1),
    _Factor("W*A", "summed over ranks and micro-batches where a mean was meant", 1, 1),
    _Factor("1/sqrt(W)", "a norm over all ranks where one rank's was meant", -0.5, 0),
    _Factor("sqrt(W)", "a norm of one rank's part where all ranks' was meant", 0.5, 0),
    _Factor("1/W**2", "divided by the world size twice too often", -2, 0),
)


def is_rounding(tensors: Sequence[TensorError], total: int) -> bool:
    """Whether errors look like rounding: small, alike in most tensors, and across the right value rather than along it."""
    errors = [row.rel_err for row in tensors]
    across = sum(abs(row.scale - 1) <= row.rel_err / 2 for row in tensors)
    return 2 * len(tensors) > total and max(errors) <= ROUNDING and max(errors) <= EVEN * min(errors) and 2 * across > len(tensors)


def _is_narrow(divergence: Divergence) -> bool:
    """Whether small errors are rounding: one rank shows them too, a collective was narrow, or they could not be more alike.

    A small term that every rank computes of its own samples (balancing, regularisation) has errors of that size, too.
    """
    tensors = divergence.tensors
    if not is_rounding(tensors, divergence.total):
        return False
    errors = [row.rel_err for row in tensors]
    along = median(abs(row.scale - 1) / row.rel_err for row in tensors)
    return 1 in divergence.found or bool(divergence.narrow) or (max(errors) <= PLAINLY_EVEN * min(errors) and along <= ALONG)


def type_of_rounding(tensors: Sequence[TensorError]) -> str:
    """The type whose rounding has this size, e.g. "bfloat16 (2**-8)"."""
    middle = median(row.rel_err for row in tensors)
    sizes = ((3e-6, "float32 (2**-24)"), (8e-5, "a narrower type's"), (1.5e-3, "float16 or TF32 (2**-11)"), (ROUNDING, "bfloat16 (2**-8)"))
    return next((name for limit, name in sizes if middle <= limit), "a narrower type's")


# Words


def _most(divergence: Divergence) -> bool:
    """Whether more than half of the tensors are off: tensors without a true gradient stay right whatever happens."""
    return 2 * len(divergence.tensors) > divergence.total


def _share(divergence: Divergence) -> str:
    count = len(divergence.tensors)
    return "every tensor is" if count == divergence.total else f"{count} of {divergence.total} tensors are"


def _amounts(tensors: Sequence[TensorError], total: int) -> str:
    errors = [row.rel_err for row in tensors]
    if len(errors) == 1 and total > 1:
        return f"only {tensors[0].tensor} is off by {errors[0]:.2g}"
    few = f" ({_names(tensors)})" if 2 * len(errors) <= total else ""
    names = "every tensor is" if len(errors) == total else f"{len(errors)} of {total} tensors{few} are"
    return f"{names} off by {min(errors):.2g} to {max(errors):.2g}"


def _few(divergence: Divergence, factor: float | None) -> str:
    tensors = divergence.tensors
    who = (
        f"only tensor {tensors[0].tensor} is"
        if len(tensors) == 1
        else f"{len(tensors)} of {divergence.total} tensors ({_names(tensors)}) are"
    )
    if factor is not None and abs(factor) <= SAME:
        return f"{who} without a gradient or a change where the reference has one"
    if factor is not None:
        return f"{who} off by the factor {factor:.4g}{named_factor(divergence)}"
    errors = [row.rel_err for row in tensors]
    return f"{who} off by {max(errors):.2g}" + ("" if len(errors) == 1 else " at most")


def _names(tensors: Sequence[TensorError]) -> str:
    return listed(sorted(row.tensor for row in tensors))


def _said(kind: Kind, divergence: Divergence, words: str) -> Diagnosis:
    sizes = f"at W={listed(sorted(divergence.found))}"
    clean = f", not at W={listed(sorted(divergence.clean_sizes))}" if divergence.clean_sizes else ""
    return Diagnosis(
        kind=kind, words=f"{words} ({STAGE_WORDS.get(divergence.stage, divergence.stage)}, step {divergence.step}, {sizes}{clean})"
    )
