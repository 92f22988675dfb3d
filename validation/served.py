"""What a serving version leaves for the monitor to judge: its health, its predictions, their outcomes, and what its inputs look like.

Days are ISO texts ("2013-12-24"), complete ones: `today` is the last day that is over, and no row is later. A day is the day of the
prediction; an outcome also says on which day it became known. Rows of other versions may stand in the frames: they are left out by
exact version and counted, never mixed in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd

# One row a day. requests: asked of the service; answered: with a prediction, in time; latency_p95_ms: of the answered, NaN = none.
HEALTH_COLUMNS = ("day", "requests", "answered", "latency_p95_ms")

# One row per row that was scored. row_id: int, unique within a version; score, reference_score: of the serving version and of its
# fallback on the same row; the probability of the event, or the largest of the classes' probabilities.
PREDICTION_COLUMNS = ("row_id", "day", "version", "score", "reference_score")

# One row per outcome, and one column (text) for each slice. known: day on which the outcome became known; excluded: why there is no
# utility although all is known (a flight that was cancelled), "" = there is one; utility and reference_utility: worth of the two
# decisions on this row, in the recipe's unit; loss (nats), confidence and hit: of the serving version, as trainer.recipe.Outcomes.
MATURED_COLUMNS = ("row_id", "version", "known", "excluded", "utility", "reference_utility", "loss", "confidence", "hit")

Frame = pd.DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """What a column did by itself where the model was made: its worst day and week there. The defaults say that nobody looked."""

    missing: float = 0.0  # largest share of a day's rows without a value
    share: float = 1.0  # largest share of a day's values in one bin
    index: float = 0.0  # largest stability index of a week against all other weeks, beyond chance


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnCounts:
    """One column, or the scores, as counts over the same bins: where the model was made and on each day served (`drift.count_column`)."""

    name: str
    bins: tuple[str, ...]  # what falls into each, in words; a missing value falls into none
    reference: tuple[int, ...]  # rows a bin: train split for a column, judge split for the scores
    reference_missing: int  # rows without a value
    served: Mapping[str, tuple[int, ...]]  # day -> rows a bin
    served_missing: Mapping[str, int]  # day -> rows without a value
    usual: Usual = field(default_factory=Usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorRecords:
    """Everything that one version served from its first day to today, beside the fallback that would take over."""

    model: str
    version: str
    model_sha256: str  # of the serving version's files
    reference_version: str  # scores the same rows in the shadow
    reference_kind: Literal["last_known_good", "baseline"]
    since: str  # first day that the version served whole
    today: str  # last day that is over
    utility_unit: str
    utility_scale: float  # standard deviation of the fallback's utility on the release's judge split: fixed before the first prediction
    slices: Mapping[str, tuple[str, ...]]  # slice column of `matured` -> its values on the judge split; any other value is "(new)"
    health: Frame  # HEALTH_COLUMNS
    predictions: Frame  # PREDICTION_COLUMNS
    matured: Frame  # MATURED_COLUMNS and the slice columns
    inputs: tuple[ColumnCounts, ...]  # the contract's columns
    scores: tuple[ColumnCounts, ...] = field(default=())  # of the serving version; () = not counted
    waiver_lapsed: str = ""  # which waiver of this version's release no longer counts, in a sentence; "" = none
