"""The legs of gradient_equivalence: which runs a kind of trainer has to make, at which world sizes, and which of them ended."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from validation.records import Condition, Leg

Sizes = Literal["every", "ends", "widest", "parallel"]  # all; one and the widest; the widest; two and the widest
Trainer = Literal["ours", "own", "any"]  # all ours; with brought hooks that decide the weights; either
EVALUATION = "evaluation"  # name of a leg that stands for an own evaluation which raised; the training beside it was run without
NO_PATH = ("evaluate", "save", "load")  # hooks that do not decide the weights of a run; all others do (trainer.hooks.PATH)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegKind:
    """What a leg shows and what it runs."""

    trainer: Trainer
    sizes: Sizes
    shows: str
    dropout: bool = False  # dropout and augmentation as trained
    hooks: tuple[str, ...] = ()  # only where one of these hooks was brought
    condition: str = ""  # the hard condition that it makes: not held where the recipe excludes that
    compared: bool = False  # with the float64 reference
    hardened: bool = True  # under the hard conditions; False: the recipe as it is


LEGS: dict[str, LegKind] = {
    "exact": LegKind(trainer="ours", sizes="every", dropout=True, shows="the same bits on every rank at every world size"),
    "own": LegKind(trainer="own", sizes="every", dropout=True, shows="ranks that hold one model, and the right samples"),
    "real": LegKind(trainer="ours", sizes="ends", dropout=True, hardened=False, shows="the same bits at the recipe's own sizes"),
    "logic": LegKind(trainer="any", sizes="every", compared=True, shows="the right gradient and update in float64"),
    "unclipped": LegKind(
        trainer="any", sizes="every", compared=True, hooks=("step",), shows="the right gradient before clipping, where a step does it all"
    ),
    "training": LegKind(trainer="any", sizes="widest", compared=True, shows="the right gradient in the precision as trained"),
    "fast": LegKind(trainer="ours", sizes="widest", compared=True, shows="the right gradient with torch's own reduction"),
    "spike": LegKind(trainer="any", sizes="ends", condition="spike", shows="one answer of all ranks to a huge loss"),
    "overflow": LegKind(trainer="any", sizes="ends", condition="overflow", shows="one answer of all ranks to an infinite loss"),
    "soak": LegKind(trainer="any", sizes="parallel", shows="the same gradient every time"),
}


def is_own(brought: Sequence[str]) -> bool:
    """Whether a recipe with these brought hooks trains its own way, and is compared by noise and replicas instead of by bits."""
    return any(name not in NO_PATH for name in brought)


def required_legs(brought: Sequence[str], world_sizes: Sequence[int], conditions: Iterable[Condition] = ()) -> tuple[tuple[str, int], ...]:
    """Name the runs that have to be there, as (leg, world size), in the order of LEGS and of rising world size.

    Args: brought, names of the recipe's own hooks; world_sizes, at least one; conditions, as chosen: a leg whose condition is not held is
    left out.
    """
    excluded = {condition.name for condition in conditions if not condition.held}
    own = "own" if is_own(brought) else "ours"
    kinds = (
        (name, kind) for name, kind in LEGS.items()
        if kind.trainer in (own, "any") and kind.condition not in excluded and (not kind.hooks or set(kind.hooks) & set(brought))
    )  # fmt: skip
    return tuple((name, size) for name, kind in kinds for size in _sizes(kind.sizes, world_sizes))


def _sizes(sizes: Sizes, world_sizes: Sequence[int]) -> list[int]:
    there = sorted(set(world_sizes))
    match sizes:
        case "every":
            return there
        case "ends":
            return sorted({there[0], there[-1]})
        case "widest":
            return there[-1:]
        case "parallel":
            return sorted({next((size for size in there if size > 1), there[-1]), there[-1]})


def finished(legs: Iterable[Leg], *names: str) -> list[Leg]:
    """Legs of these names that ran to their end, in the order of LEGS and of rising world size; of one made twice the first."""
    found = {(leg.name, leg.world_size): leg for leg in reversed(list(legs)) if leg.name in names and not leg.stopped}
    return [found[key] for key in sorted(found, key=lambda key: (list(LEGS).index(key[0]), key[1]))]


def place(leg: Leg, step: object = None, rank: object = None) -> str:
    """Where in a leg, in words: "own leg, W=4, step 2, rank 1"."""
    parts = [f"{leg.name} leg", f"W={leg.world_size}"]
    parts += [f"step {step}"] if step is not None else []
    return ", ".join([*parts, f"rank {rank}"] if rank is not None else parts)
