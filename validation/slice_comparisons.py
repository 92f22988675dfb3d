"""The comparisons behind slice_quality: utility against each reference and calibration, in every slice that is large enough.

Two kinds of bounds, because two kinds of claims are made about the same family of m comparisons (docs/gates/slice_quality.md):

- "no slice is worse" needs every comparison, so each is tested at the policy's confidence by itself. The chance to pass a candidate
  that is worse somewhere is at most 1 - confidence, whatever m (intersection-union test, Berger 1982).
- "a slice is worse" needs one comparison of m, so its bound is widened by Bonferroni to 1 - (1 - confidence) / m. The chance to fail
  a candidate that is worse nowhere is at most 1 - confidence.

Where even the widened half-width is larger than the margin, the slice cannot tell a good candidate from a bad one: unless it passes
or fails all the same, it is reported as not decidable, and what is not decidable counts against coverage.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from validation.policy import SlicePolicy
from validation.records import SliceRecords
from validation.slice_stats import Bounds, Cells, Floats, bounds, cells, mean_by_slice, standard_error

PASSED, FAILED, UNCERTAIN, UNDECIDABLE = "pass", "fail", "inconclusive", "not decidable, n too small"
CALIBRATION = "calibration"  # stands in the place of a reference
INCUMBENT = "last_known_good"  # the one reference that the candidate need not beat: it is of its own kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One slice against one reference, or its calibration."""

    column: str
    slice_name: str  # "column=value"
    reference: str  # a contender, or CALIBRATION
    n: int  # samples
    clusters: int
    observed: float  # mean paired utility difference candidate - reference, or |mean confidence - hit rate|
    low: float
    high: float
    limit: float  # the difference has to be >= limit; the gap has to be <= limit
    scale: float  # standard deviation of the reference's utility over the whole judge set; 1 for calibration
    status: str

    @property
    def severity(self) -> float:
        """How far the unfavourable end lies beyond the limit, in scales; larger is worse."""
        beyond = self.high - self.limit if self.reference == CALIBRATION else self.limit - self.low
        return beyond / self.scale if self.scale > 0 else beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFacts:
    """What a slice is like, for the reader."""

    column: str
    slice_name: str
    n: int
    clusters: int
    base_rate: float  # mean of the candidate's hit
    confidence: float  # mean of the candidate's confidence
    utility: Mapping[str, float]  # contender -> mean, recipe's unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparisons:
    """The whole family."""

    family: int  # m: comparisons that share the confidence
    samples: int
    overall: tuple[Comparison, ...]  # utility on the whole judge set against each reference
    superiority: tuple[Comparison, ...]  # better than baseline and rule? `column` is the measure: "utility" or "log loss"
    utility: tuple[Comparison, ...]  # every large enough slice against each reference
    calibration: tuple[Comparison, ...]
    facts: tuple[SliceFacts, ...]  # of the slices with at least min_n samples
    small: Mapping[str, tuple[int, int]]  # column -> slices and samples below min_n


def compare(records: SliceRecords, policy: SlicePolicy, outcomes: pd.DataFrame) -> Comparisons:
    """Make all comparisons on `outcomes` (the records' own or the planted ones), which must be complete and finite."""
    references = records.contenders[1:]
    groups = {column: cells(outcomes[column], outcomes["cluster"]) for column in records.slices}
    large = {column: group.n >= policy.min_n.value for column, group in groups.items()}
    slices = sum(int(keep.sum()) for keep in large.values())
    measure = _Measure(outcomes=outcomes, references=references, policy=policy, family=(slices + 1) * len(references) + slices)
    everything = cells(pd.Series("all", index=outcomes.index), outcomes["cluster"])
    return Comparisons(
        family=measure.family,
        samples=len(outcomes),
        overall=tuple(measure.utilities("", everything, np.array([True]))),
        superiority=tuple(measure.superiorities(everything)),
        utility=tuple(item for column in groups for item in measure.utilities(column, groups[column], large[column])),
        calibration=tuple(item for column in groups for item in measure.calibrations(column, groups[column], large[column])),
        facts=tuple(item for column in groups for item in _facts(column, groups[column], large[column], outcomes, records.contenders)),
        small={column: (int((~large[column]).sum()), int(group.n[~large[column]].sum())) for column, group in groups.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    outcomes: pd.DataFrame
    references: Sequence[str]
    policy: SlicePolicy
    family: int

    def utilities(self, column: str, group: Cells, keep: npt.NDArray[np.bool_]) -> Iterable[Comparison]:
        """Paired utility differences in the kept slices, against each reference."""
        candidate = _numbers(self.outcomes, "utility_candidate")
        for reference in self.references:
            theirs = _numbers(self.outcomes, f"utility_{reference}")
            scale = float(theirs.std())
            margin = self.policy.margin.value * scale
            mean, reach = self._estimate(group, candidate - theirs)
            # passing looks at the plain lower end, failing at the widened upper end
            low, high = mean - reach.plain, mean + reach.family
            status = _status(good=low >= -margin, bad=high < -margin, wide=~(reach.family <= margin), suspect=mean + reach.plain < -margin)
            yield from _rows(column, group, keep, reference, (mean, low, high), status, limit=-margin, scale=scale)

    def calibrations(self, column: str, group: Cells, keep: npt.NDArray[np.bool_]) -> Iterable[Comparison]:
        """|mean confidence - hit rate| of the candidate in the kept slices."""
        limit = self.policy.calibration_max.value
        signed, reach = self._estimate(group, _numbers(self.outcomes, "confidence_candidate") - _numbers(self.outcomes, "hit_candidate"))
        gap = np.abs(signed)
        low, high = np.maximum(gap - reach.family, 0.0), gap + reach.plain
        status = _status(good=high <= limit, bad=low > limit, wide=~(reach.family <= limit), suspect=gap - reach.plain > limit)
        yield from _rows(column, group, keep, CALIBRATION, (gap, low, high), status, limit=limit, scale=1.0)

    def superiorities(self, everything: Cells) -> Iterable[Comparison]:
        """Is the candidate better on the whole than those it has to justify its cost against? By either of two measures.

        Utility counts one action at one threshold and is noisy; log loss is a proper score, better at any threshold, and on flights
        three times as sharp. Showing either is enough, so each is tested at half of 1 - confidence.
        """
        half = 1 - (1 - self.policy.confidence.value) / 2
        for reference in self.references:
            gains = {
                "utility": _numbers(self.outcomes, "utility_candidate") - _numbers(self.outcomes, f"utility_{reference}"),
                "log loss": _numbers(self.outcomes, f"loss_{reference}") - _numbers(self.outcomes, "loss_candidate"),
            }
            for name, gain in gains.items():
                if reference != INCUMBENT and np.isfinite(gain).all():  # a contender that was sure and wrong has no mean log loss
                    mean, reach = self._estimate(everything, gain, confidence=half)
                    low, high = mean - reach.plain, mean + reach.family
                    status = [PASSED if low[0] > 0 else FAILED if high[0] <= 0 else UNCERTAIN]
                    estimate, keep = (mean, low, high), np.array([True])
                    yield from _rows(name, everything, keep, reference, estimate, status, limit=0.0, scale=float(gain.std()))

    def _estimate(self, group: Cells, values: Floats, *, confidence: float | None = None) -> tuple[Floats, Bounds]:
        error, level = standard_error(group, values), confidence or self.policy.confidence.value
        return mean_by_slice(group, values), bounds(group, error, confidence=level, family=self.family)


def _status(
    *, good: npt.NDArray[np.bool_], bad: npt.NDArray[np.bool_], wide: npt.NDArray[np.bool_], suspect: npt.NDArray[np.bool_]
) -> list[str]:
    """Name each slice's outcome; a wide interval that would be bad without the correction stays inconclusive."""
    choices = [PASSED, FAILED, UNDECIDABLE]
    return [str(word) for word in np.select([good, bad, wide & ~suspect], choices, default=UNCERTAIN)]


def _rows(
    column: str, group: Cells, keep: npt.NDArray[np.bool_], reference: str, estimate: tuple[Floats, Floats, Floats], status: Sequence[str],
    *, limit: float, scale: float,
) -> Iterable[Comparison]:  # fmt: skip
    observed, low, high = estimate
    for index in np.flatnonzero(keep).tolist():
        yield Comparison(
            column=column, slice_name=f"{column}={group.labels[index]}" if column else "all", reference=reference,
            n=int(group.n[index]), clusters=int(group.clusters[index]), observed=float(observed[index]), low=float(low[index]),
            high=float(high[index]), limit=limit, scale=scale, status=status[index],
        )  # fmt: skip


def _facts(
    column: str, group: Cells, keep: npt.NDArray[np.bool_], outcomes: pd.DataFrame, contenders: Sequence[str]
) -> Iterable[SliceFacts]:
    hits = mean_by_slice(group, _numbers(outcomes, "hit_candidate"))
    confidences = mean_by_slice(group, _numbers(outcomes, "confidence_candidate"))
    utility = {contender: mean_by_slice(group, _numbers(outcomes, f"utility_{contender}")) for contender in contenders}
    for index in np.flatnonzero(keep).tolist():
        yield SliceFacts(
            column=column, slice_name=f"{column}={group.labels[index]}", n=int(group.n[index]), clusters=int(group.clusters[index]),
            base_rate=float(hits[index]), confidence=float(confidences[index]),
            utility={contender: float(means[index]) for contender, means in utility.items()},
        )  # fmt: skip


def _numbers(outcomes: pd.DataFrame, column: str) -> Floats:
    return outcomes[column].to_numpy(np.float64)
