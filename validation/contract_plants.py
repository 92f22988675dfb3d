"""Defects planted into small samples of the frames: the data_contract gate has to refuse each of them in every run."""

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from validation.contract import DataContract, Plant

PLANT_ROWS = 2_000  # rows of a planted frame: enough for every expectation, next to free


def plant_into(plant: Plant, frames: Mapping[str, pd.DataFrame], spec: DataContract) -> pd.DataFrame | None:
    """Make a planted frame from samples of `frames`; None when the split or the columns that it needs are not there."""
    samples = {split: _sample(frame) for split, frame in frames.items()}
    if plant.name == "judge-rows":
        return pd.concat([samples["train"], samples["judge"]]) if {"train", "judge"} <= set(samples) else None
    sample = samples.get(plant.split)
    if sample is None:
        return None
    if plant.name == "late-column":
        return sample.assign(**{spec.forbidden[0]: 0.0}) if spec.forbidden else None
    return _with_nulls(sample, spec)


def _sample(frame: pd.DataFrame) -> pd.DataFrame:
    """Take evenly spaced rows, so that a sorted frame keeps its first and nearly its last event."""
    return frame.iloc[:: max(1, -(-len(frame) // PLANT_ROWS))]


def _with_nulls(sample: pd.DataFrame, spec: DataContract) -> pd.DataFrame | None:
    """Null out more rows than the strictest column allows: half-way between its limit and all."""
    present = [column for column in spec.columns if column in sample]
    if not present:
        return None
    strictest = min(present, key=lambda column: spec.columns[column].max_null_share)
    nulled = math.ceil(len(sample) * (1 + spec.columns[strictest].max_null_share) / 2)
    kept = np.arange(len(sample)) >= nulled
    return sample.assign(**{strictest: sample[strictest].where(kept)})
