"""Gradient errors in units of float noise, and what their pattern over tensors says about the cause."""

import numpy as np
import pandas as pd

from validation.completeness import listed
from validation.records import Frame

SAME = 0.01  # relative spread below which tensors count as off by the same factor; float32 noise is 1e-7, bfloat16 2e-2


def errors_in_noise(errors: Frame, leg: str) -> Frame:
    """One leg's rows with the column `in_noise` = rel_err / noise, sorted by step, world size and tensor.

    0 / 0 is 0 (an exact result needs no allowance), an error without noise is infinite; NaN, negative or infinite noise and NaN or negative
    errors give NaN, which no threshold lets pass.
    """
    rows = errors[errors["leg"] == leg].sort_values(["step", "world_size", "tensor"]).reset_index(drop=True)
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


def signature(rows: Frame, limit: float) -> str:
    """Say in a sentence which tensors are off, how, and at which world sizes, as far as the errors carry it.

    Args: rows of one leg from `errors_in_noise`; limit, of `in_noise`; at least one row is beyond it.
    """
    failing = rows[~(rows["in_noise"] <= limit)]
    if failing["in_noise"].isna().any():
        tensors = sorted(set(failing[failing["in_noise"].isna()]["tensor"]))
        return f"not a number in {listed(tensors)}: look for an overflow or a division by zero in loss, weight or noise estimate"
    first = failing.iloc[0]
    group = failing[(failing["step"] == first["step"]) & (failing["world_size"] == failing["world_size"].max())]
    group = group if len(group) else failing[failing["step"] == first["step"]]
    total = int(rows["tensor"].nunique())
    return f"{_pattern(group, total)}; first at step {first['step']}; {_sizes(rows, failing)}"


def _pattern(group: Frame, total: int) -> str:
    errors, size = group["rel_err"].to_numpy(dtype=float), int(group["world_size"].iloc[0])
    tensors = "every tensor is" if len(group) == total else f"{len(group)} of {total} tensors are"
    if len(group) == 1 and total > 1:
        name = group["tensor"].iloc[0]
        return f"only tensor {name} is off: look at that tensor's reduction (frozen when wrapped, unused, tied or not registered)"
    if 2 * len(group) > total and errors.max() - errors.min() <= SAME * errors.max():  # tensors without a true gradient stay right
        return f"{tensors} off by the same {errors.max():.4g}: look at the normalisation{_factor(float(errors.max()), size)}"
    if len(group) < total:
        return f"{tensors} off ({listed(sorted(group['tensor']))}): look at what only they take part in"
    return "every tensor is off, each by its own amount: look at samples left out or repeated, and at how samples are weighed"


def _factor(error: float, size: int) -> str:
    """Name the scale that would give this error at this world size; |scale - 1| is all that a relative error carries."""
    if size > 1 and abs(error - (1 - 1 / size)) < SAME:
        return f" (as if divided by the world size {size} once more)"
    if size > 1 and abs(error - (size - 1)) < SAME * size:
        return f" (as if multiplied by the world size {size}, or summed where a mean was meant)"
    return ""


def _sizes(rows: Frame, failing: Frame) -> str:
    measured, bad = sorted(set(rows["world_size"])), sorted(set(failing["world_size"]))
    if len(bad) == len(measured):
        return f"at every measured world size ({listed(bad)})"
    return f"at world sizes {listed(bad)}, not at {listed(size for size in measured if size not in bad)}"
