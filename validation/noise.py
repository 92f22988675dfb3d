"""Errors against the reference in units of float noise, and where one leg first leaves it."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from validation.diagnosis import Divergence, TensorError
from validation.records import STAGES, Frame


def errors_in_noise(errors: Frame, leg: str) -> Frame:
    """One leg's rows with the column `in_noise` = rel_err / noise, sorted by step, stage, world size and tensor.

    0 / 0 is 0 (an exact result needs no allowance), an error without noise is infinite; NaN, negative or infinite noise and NaN or negative
    errors give NaN, which no threshold lets pass.
    """
    rows = errors[errors["leg"] == leg]
    rows = rows.assign(order=[STAGES.index(stage) if stage in STAGES else len(STAGES) for stage in rows["stage"]])
    rows = rows.sort_values(["step", "order", "world_size", "tensor"]).drop(columns="order").reset_index(drop=True)
    rel_err, noise = rows["rel_err"].to_numpy(dtype=float), rows["noise"].to_numpy(dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where((rel_err == 0) & (noise == 0), 0.0, rel_err / noise)
    ratio[~(np.isfinite(noise) & (noise >= 0) & (rel_err >= 0))] = np.nan
    return rows.assign(in_noise=ratio)


def worst_row(rows: Frame) -> "pd.Series[float]":
    """The row with the largest `in_noise`; a NaN is worse than any number, the first row wins a tie. `rows` may not be empty."""
    ratio = rows["in_noise"].to_numpy(dtype=float)
    broken = np.flatnonzero(np.isnan(ratio))
    return rows.iloc[int(broken[0]) if broken.size else int(ratio.argmax())]


def beyond(rows: Frame, limit: float) -> Frame:
    """The rows that are not within the limit; NaN is not."""
    return rows[~(rows["in_noise"] <= limit)]


def first_beyond(rows: Frame, limit: float) -> Frame:
    """Those rows of the first step and, in it, the first stage that has any; empty when all are within the limit."""
    found = beyond(rows, limit)
    return found if found.empty else found[(found["step"] == found["step"].iloc[0]) & (found["stage"] == found["stage"].iloc[0])]


def first_divergence(
    legs: Mapping[str, Frame], leg: str, limit: float, *, micro_batches: Mapping[int, int] | None = None, rates_differ: bool = False
) -> Divergence | None:
    """Where a leg first leaves the reference, beside what is within the limit there; None when it nowhere does.

    Args: legs, rows of each from `errors_in_noise`; micro_batches, world size -> those of a rank in one step.
    """
    rows, first = legs[leg], first_beyond(legs[leg], limit)
    if first.empty:
        return None
    step, stage, sizes = int(first["step"].iloc[0]), str(first["stage"].iloc[0]), set(first["world_size"])
    widest = max(sizes)
    here = rows[(rows["step"] == step) & (rows["stage"] == stage)]
    same = rows[(rows["step"] == step) & rows["world_size"].isin(sizes) & (rows["stage"] != stage)]
    there = {
        name: other[(other["step"] == step) & (other["stage"] == stage) & (other["world_size"] == widest)]
        for name, other in legs.items() if name != leg
    }  # fmt: skip
    earlier = STAGES[: STAGES.index(stage)] if stage in STAGES else STAGES
    return Divergence(
        leg=leg, step=step, stage=stage, total=int(here[here["world_size"] == widest]["tensor"].nunique()),
        found={size: _tensors(first[first["world_size"] == size]) for size in sorted(int(size) for size in sizes)},
        clean_sizes=tuple(sorted(int(size) for size in set(here["world_size"]) - sizes)),
        clean_stages=tuple(name for name in earlier if name in set(same["stage"])),
        clean_legs=tuple(name for name, part in there.items() if len(part) and beyond(part, limit).empty),
        micro_batches=micro_batches or {}, rates_differ=rates_differ,
    )  # fmt: skip


def _tensors(rows: Frame) -> tuple[TensorError, ...]:
    columns = ("tensor", "rel_err", "scale", "in_noise")
    return tuple(
        TensorError(str(name), float(error), float(scale), float(ratio))
        for name, error, scale, ratio in zip(*(rows[column] for column in columns), strict=True)
    )
