"""What the hard conditions and the reference hand to the process that decides. Torch-free, like that process."""

from dataclasses import dataclass

from trainer.config import Conditions
from validation.records import Condition, Frame

# what a gate switches on so that a fault shows; a recipe may exclude any by name, with a reason: excludes = {"clipping": "..."}
CONDITIONS = (
    "ragged_weights", "ragged_batches", "clipping", "dropout", "accumulation", "epoch_border", "rate_change", "spike", "overflow",
    "finite_differences",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The conditions that gates train under, and which of CONDITIONS hold."""

    conditions: Conditions
    held: tuple[Condition, ...]  # one for each name of CONDITIONS, in its order


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What one process would consume and do."""

    expected: Frame  # EXPECTED_COLUMNS
    order: tuple[int, ...]  # sample ids in position order, from the permutation alone; () with an own sampler or loader
    rates: tuple[str, ...]  # by step: learning rates of the optimizer's groups in that update, canonical JSON
    frozen: tuple[str, ...]  # parameters that want no gradient
    judged_ids: tuple[int, ...]  # what an evaluation has to count, each once
    draws_by_key: bool  # samples look different by their keys: augmentation of sample and epoch
    slopes: Frame  # SLOPE_COLUMNS
    slopes_excluded: str  # why there are none, "" when there are
