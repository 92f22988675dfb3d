"""Is the gradient right: every tensor of the compared legs against the float64 reference, in units of its own float noise; and slopes."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from validation.completeness import absent_columns, listed
from validation.diagnosis import STAGE_WORDS, Divergence, diagnose
from validation.diagnosis_kinds import Kind, said
from validation.equivalence_legs import LEGS, finished
from validation.equivalence_poison import without_skipped
from validation.noise import beyond, errors_in_noise, first_beyond, first_divergence, worst_row
from validation.policy import EquivalencePolicy, Threshold
from validation.records import COLLECTIVE_COLUMNS, CONSUMED_COLUMNS, GRADIENT_ERROR_COLUMNS, SLOPE_COLUMNS, EquivalenceRecords, Frame
from validation.verdict import Check, Plot, Series, Table, check

COMPARED = (*(name for name, kind in LEGS.items() if kind.compared), "spike")
ERROR_STAGES = ("reduced", "clipped", "weight")
SHOWN_TENSORS = 30  # in the plot, the worst ones
WIDTH = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "int8": 8}  # bits; uint8 carries pickled objects
ALL_TENSORS = "all tensors"  # trainer.slopes.ALL: the direction that moves every tensor


def legs_in_noise(records: EquivalenceRecords) -> dict[str, Frame]:
    """Each compared leg's errors with `in_noise`; legs without rows are left out."""
    if absent_columns(records.errors, GRADIENT_ERROR_COLUMNS) or records.errors.empty:
        return {}
    errors = without_skipped(records, records.errors[records.errors["stage"].isin(ERROR_STAGES)])
    return {leg: rows for leg in COMPARED if len(rows := errors_in_noise(errors, leg))}


def error_checks(records: EquivalenceRecords, policy: EquivalencePolicy, *, rates_differ: bool) -> list[Check]:
    """One check a leg and stage: the worst tensor of the first step that is beyond the limit, or of all."""
    legs, limit = legs_in_noise(records), policy.noise_multiple
    checks = []
    for leg, rows in legs.items():
        first = first_divergence(legs, leg, limit.value, micro_batches=micro_batches(records, leg), rates_differ=rates_differ)
        narrow = narrow_types(records, leg) if first is not None else ()
        first = first and replace(first, narrow=narrow)
        for stage in sorted(set(rows["stage"]) & set(ERROR_STAGES), key=lambda name: _turn(name, first)):
            staged = rows[rows["stage"] == stage]
            failing = first_beyond(staged, limit.value)
            row = worst_row(failing if len(failing) else staged)
            action = ""
            if first is not None and len(failing):
                is_first = (first.stage, first.step) == (stage, int(failing["step"].iloc[0]))
                follows = f"follows from the {STAGE_WORDS.get(first.stage, first.stage)} at step {first.step}"
                found = diagnose(first)
                carried = f"; collectives of this leg carried {listed(narrow)}" if narrow and found.kind == "precision" else ""
                action = f"{found}{carried}" if is_first else follows
            checks.append(
                check(
                    f"{leg} leg: {STAGE_WORDS[stage]}, worst tensor", float(row["in_noise"]), "<=", limit.value, unit="x its float noise",
                    source=limit.source, action=action, where=f"{'first at' if len(failing) else 'at'} step {row['step']}, W="
                    f"{row['world_size']}, tensor {row['tensor']}: relative error {row['rel_err']:.3g}, noise {row['noise']:.3g}",
                )
            )  # fmt: skip
    return checks


def is_wrong_alone(records: EquivalenceRecords, policy: EquivalencePolicy) -> bool:
    """Whether one rank without any peer leaves the reference in float64."""
    rows = legs_in_noise(records).get("logic")
    return rows is not None and not beyond(rows[rows["world_size"] == 1], policy.noise_multiple.value).empty


def moved_checks(records: EquivalenceRecords, policy: EquivalencePolicy) -> list[Check]:
    """Buffers, and averages that hooks keep, of an own trainer after the first update, beside the fewest ranks'.

    Alike on all ranks, buffers may still be of one's samples, and averages may have moved once a rank. Buffers only where a rank has one
    micro-batch: how several of them move a buffer may depend on where they are cut.
    """
    if absent_columns(records.errors, GRADIENT_ERROR_COLUMNS) or records.errors.empty:
        return []
    buffers, averages = (errors_in_noise(records.errors[records.errors["stage"] == stage], "logic") for stage in ("buffer", "average"))
    buffers = buffers[buffers["world_size"].map(micro_batches(records, "logic")).fillna(1) == 1]
    return [
        *_moved(buffers, "buffers", "buffer", "statistics of one rank's samples, or moved once a rank", policy.noise_multiple),
        *_moved(averages, "averages", "average", "moved once a rank, or of weights before all ranks' update", policy.noise_multiple),
    ]


def _moved(rows: Frame, kind: Kind, what: str, why: str, limit: Threshold[float]) -> list[Check]:
    """One check that what moves with an update does not depend on the number of ranks. Args: rows, of errors_in_noise."""
    if rows.empty:
        return []
    row, fewest = worst_row(rows), int(rows["world_size"].min())
    wrong = beyond(rows, limit.value)
    words = f"after the first update {listed(sorted(set(wrong['tensor'])))} depend on how many ranks there are, while all of them agree"
    action = said(kind, f"{words}: {why}") if len(wrong) else ""
    return [
        check(
            f"logic leg: {kind} after the first update, worst", float(row["in_noise"]), "<=", limit.value, unit="x float64 noise",
            source=limit.source, action=action,
            where=f"W={row['world_size']}, {what} {row['tensor']}: relative distance {row['rel_err']:.3g} to W={fewest}",
        )
    ]  # fmt: skip


def _turn(stage: str, first: Divergence | None) -> tuple[bool, int]:
    """The stage that leaves the reference first comes first; a wrong update makes the next step's gradient wrong."""
    return first is None or stage != first.stage, ERROR_STAGES.index(stage)


def micro_batches(records: EquivalenceRecords, leg: str) -> dict[int, int]:
    """World size -> micro-batches that a rank puts through one step, in a leg of this name or else in any."""
    counts: dict[int, int] = {}
    for found in (*finished(records.legs, leg), *finished(records.legs, *LEGS)):
        if not absent_columns(found.consumed, CONSUMED_COLUMNS) and len(found.consumed) and LEGS[found.name].hardened:
            counts.setdefault(found.world_size, int(found.consumed["micro"].max()) + 1)
    return counts


def narrow_types(records: EquivalenceRecords, leg: str) -> tuple[str, ...]:
    """Types narrower than a leg's own that its collectives carried: they may be why it lost precision."""
    found: set[str] = set()
    for run in finished(records.legs, leg):
        if not absent_columns(run.collectives, COLLECTIVE_COLUMNS):
            found |= {name for name in run.collectives["dtype"] if WIDTH.get(name, 64) < WIDTH.get(run.precision, 0)}
    return tuple(sorted(found))


def slope_checks(records: EquivalenceRecords, policy: EquivalencePolicy) -> list[Check]:
    """Autograd against finite differences: the only check of what a run shares with its reference."""
    if absent_columns(records.slopes, SLOPE_COLUMNS) or records.slopes.empty:
        return []
    rows = records.slopes.sort_values("tensor").reset_index(drop=True)
    rows = rows.assign(in_noise=rows["rel_err"].where(rows["rel_err"] >= 0))  # a negative error is no number
    row = worst_row(rows)
    limit = policy.slope_max
    wrong = sorted(name for name in beyond(rows, limit.value)["tensor"] if name != ALL_TENSORS)
    words = f"autograd and finite differences disagree in {listed(wrong or [ALL_TENSORS])}"
    action = "" if row["in_noise"] <= limit.value else said("shared", words)
    return [
        check(
            "finite differences, worst tensor", float(row["in_noise"]), "<=", limit.value, unit="relative error", source=limit.source,
            where=f"tensor {row['tensor']}: autograd {row['analytic']:.6g}, finite differences {row['numeric']:.6g}", action=action,
        )
    ]  # fmt: skip


def error_tables(records: EquivalenceRecords, policy: EquivalencePolicy) -> list[Table]:
    """The worst tensor of each leg and stage."""
    rows: list[tuple[str | float | int | None, ...]] = []
    for leg, errors in legs_in_noise(records).items():
        for stage in (stage for stage in ERROR_STAGES if stage in set(errors["stage"])):
            part = errors[errors["stage"] == stage]
            worst = worst_row(part)
            sizes = listed(sorted(set(part["world_size"])), limit=8)
            counts = (int(part["tensor"].nunique()), int(part["step"].nunique()), len(beyond(part, policy.noise_multiple.value)))
            where = (str(worst["tensor"]), int(worst["step"]), int(worst["world_size"]))
            numbers = tuple(float(worst[name]) for name in ("rel_err", "noise", "in_noise", "scale"))
            rows.append((leg, STAGE_WORDS[stage], sizes, *counts, *where, *numbers))
    columns = (
        "leg", "what", "world sizes", "tensors", "steps", "beyond the limit", "worst tensor", "at step", "at world size", "relative error",
        "its noise", "error / noise", "scale",
    )  # fmt: skip
    return [Table(title="Distance to the float64 reference", columns=columns, rows=tuple(rows))] if rows else []


def error_plots(records: EquivalenceRecords, policy: EquivalencePolicy) -> list[Plot]:
    """Each leg's worst error by tensor; zero and non-finite ratios have no place on a logarithmic axis and stand in the table."""
    series = _series(legs_in_noise(records))
    if not series:
        return []
    return [
        Plot(
            title="Error by tensor", kind="point", x_label=f"tensor (at most the worst {SHOWN_TENSORS} of a leg)",
            y_label="largest error / float noise (dimensionless)", series=series, y_log=True,
            reference=policy.noise_multiple.value, reference_label="limit",
        )
    ]  # fmt: skip


def _series(legs: Mapping[str, Frame]) -> tuple[Series, ...]:
    series = []
    for leg, rows in legs.items():
        usable = rows[np.isfinite(rows["in_noise"]) & (rows["in_noise"] > 0)]
        peaks = usable.groupby("tensor")["in_noise"].max().sort_index().nlargest(SHOWN_TENSORS, keep="all").head(SHOWN_TENSORS)
        if len(peaks):
            series.append(Series(name=leg, x=tuple(str(name) for name in peaks.index), y=tuple(float(value) for value in peaks)))
    return tuple(series)
