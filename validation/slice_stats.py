"""Means by slice with cluster-robust standard errors: samples of one cluster (a day, a user) share their luck.

The estimator is the ratio of cluster totals with the usual small-sample factor (CR1): mean = sum_g S_g / sum_g n_g and
var = G / (G - 1) * sum_g (S_g - mean * n_g)^2 / n^2, referred to Student's t with G - 1 degrees of freedom (Cameron and Miller, 2015,
"A Practitioner's Guide to Cluster-Robust Inference"). With few clusters of very unequal size it is somewhat too narrow.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy  # its parts are loaded when they are first asked for

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MISSING = "(missing)"  # how rows without a value in a slice column are called: they are people too


@dataclass(frozen=True, slots=True)
class Cells:
    """Rows sorted into (slice, cluster) cells, made once a slice column and used for every measurement."""

    labels: tuple[str, ...]  # (S,) the column's distinct values
    n: Ints  # (S,) samples
    clusters: Ints  # (S,) clusters that have samples in the slice
    cell_of_row: Ints  # (N,) 0..C-1
    slice_of_cell: Ints  # (C,) 0..S-1
    cell_n: Floats  # (C,)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far an interval reaches on either side of an estimate, by slice."""

    plain: Floats  # (S,) one-sided at the policy's confidence: for claims that need every comparison
    family: Floats  # (S,) one-sided, Bonferroni over the whole family: for claims that need one comparison


def cells(values: pd.Series, clusters: pd.Series) -> Cells:
    """Sort N rows into cells of one slice column; values are read as text."""
    text = values.astype("object").where(values.notna(), MISSING).astype(str)
    slice_codes, labels = pd.factorize(text, sort=True)
    cluster_codes, distinct = pd.factorize(clusters)
    keys, cell_of_row = np.unique(slice_codes.astype(np.int64) * len(distinct) + cluster_codes, return_inverse=True)
    slice_of_cell = keys // len(distinct)
    size = len(labels)
    return Cells(
        labels=tuple(str(label) for label in labels),
        n=np.bincount(slice_codes, minlength=size),
        clusters=np.bincount(slice_of_cell, minlength=size),
        cell_of_row=cell_of_row,
        slice_of_cell=slice_of_cell,
        cell_n=np.bincount(cell_of_row).astype(np.float64),
    )


def mean_by_slice(group: Cells, values: Floats) -> Floats:
    """Mean (S,) of values (N,) in each slice."""
    totals = _cell_totals(group, values)
    return _by_slice(group, totals) / group.n


def standard_error(group: Cells, values: Floats) -> Floats:
    """Cluster-robust standard error (S,) of the mean; NaN in a slice with one cluster, where nothing can be said."""
    totals = _cell_totals(group, values)
    residuals = totals - (_by_slice(group, totals) / group.n)[group.slice_of_cell] * group.cell_n
    spread = _by_slice(group, residuals**2)
    factor = np.where(group.clusters > 1, group.clusters / np.maximum(group.clusters - 1, 1), np.nan)
    return np.sqrt(factor * spread) / group.n


def bounds(group: Cells, error: Floats, *, confidence: float, family: int) -> Bounds:
    """Reach (S,) of a one-sided interval, alone and as one of `family` simultaneous ones."""
    freedom = np.maximum(group.clusters - 1, 1)
    alone = scipy.special.stdtrit(freedom, confidence) * error
    together = scipy.special.stdtrit(freedom, 1 - (1 - confidence) / max(family, 1)) * error
    return Bounds(plain=np.asarray(alone, np.float64), family=np.asarray(together, np.float64))


def _cell_totals(group: Cells, values: Floats) -> Floats:
    return np.asarray(np.bincount(group.cell_of_row, weights=values, minlength=len(group.cell_n)), np.float64)


def _by_slice(group: Cells, per_cell: Floats) -> Floats:
    return np.asarray(np.bincount(group.slice_of_cell, weights=per_cell, minlength=len(group.labels)), np.float64)
