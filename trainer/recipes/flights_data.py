"""The flights recipe's splits: encoded once, kept under the cache folder, read by every rank as memory maps."""

import functools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from trainer.recipe import LIVE, SPLITS, Batch, cache_folder
from trainer.recipes import flights_features, flights_history, flights_source
from trainer.recipes.flights_features import CATEGORIES, NUMBERS, contract_frame, live_frame
from trainer.recipes.flights_source import read_tables, source_folder, source_sha256
from trainer.recipes.prepared import prepared_once
from validation.canonical import digest, sha256_hex
from validation.errors import DataError

# [first, last) scheduled departure, New York wall clock
PERIOD = {"train": ("2013-01-01", "2013-10-01"), "judge": ("2013-10-01", "2013-12-01")}
LIVE_PERIOD = ("2013-12-01", "2014-01-01")  # what a version that serves is asked; outcomes come in day by day
FLAGGED = ("plane_age", "temp", "pressure")  # one indicator for each source that can be silent: registry, station, barometer
CONTINUOUS = len(NUMBERS) - 1 + len(FLAGGED) + 2 + 7  # numbers but the weekday, indicators, the hour on a circle, weekdays one-hot
FEATURES = CONTINUOUS + len(CATEGORIES)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How a contract frame becomes inputs; fitted on the train split alone."""

    mean: tuple[float, ...]  # of the squashed numbers, in the order of NUMBERS
    std: tuple[float, ...]
    vocabulary: dict[str, tuple[str, ...]]  # category -> values; code 0 is kept for what was never seen

    def sizes(self) -> tuple[int, ...]:
        """Number of codes of each category, the reserved one included, in the order of CATEGORIES."""
        return tuple(len(self.vocabulary[name]) + 1 for name in CATEGORIES)


def fit_encoding(train: pd.DataFrame) -> Encoding:
    """Means, deviations and vocabularies of the train split."""
    numbers = _squashed(train)
    vocabulary = {name: tuple(sorted(train[name].unique())) for name in CATEGORIES}
    return Encoding(mean=tuple(np.nanmean(numbers, axis=0).tolist()), std=tuple(np.nanstd(numbers, axis=0).tolist()), vocabulary=vocabulary)


def encode(frame: pd.DataFrame, encoding: Encoding) -> Floats:
    """Turn a contract frame of N rows into inputs (N, FEATURES): CONTINUOUS standardised columns, then one code for each category.

    Numbers are squashed by sign(x) log(1 + |x|) (delays and counts have long tails), standardised, cut at 5 deviations; a missing
    one becomes the train mean, and the indicators say so.
    """
    spread = np.maximum(np.array(encoding.std), 1e-6)
    scaled = np.nan_to_num(np.clip((_squashed(frame) - np.array(encoding.mean)) / spread, -5.0, 5.0))
    weekday = frame["weekday"].to_numpy()
    angle = frame["hour"].to_numpy() * (2 * math.pi / 24)
    parts = [
        np.delete(scaled, NUMBERS.index("weekday"), axis=1), frame[list(FLAGGED)].isna().to_numpy(),
        np.sin(angle)[:, None], np.cos(angle)[:, None], weekday[:, None] == np.arange(7),
        *(pd.Index(encoding.vocabulary[name]).get_indexer(pd.Index(frame[name]))[:, None] + 1 for name in CATEGORIES),
    ]  # fmt: skip
    return np.concatenate(parts, axis=1, dtype=np.float32)


def _squashed(frame: pd.DataFrame) -> npt.NDArray[np.float64]:
    numbers = frame[list(NUMBERS)].to_numpy(np.float64)
    return np.asarray(np.sign(numbers) * np.log1p(np.abs(numbers)))


class FlightsSplit:
    """One split on memory maps (trainer.recipe.SplitData); ranks on one machine share the pages."""

    pure = True

    def __init__(self, folder: Path, split: str) -> None:
        self._frame_path = folder / f"{split}.parquet"
        try:
            self.inputs = np.load(folder / f"{split}.inputs.npy", mmap_mode="r")  # (N, FEATURES) float32
            self.labels = np.load(folder / f"{split}.labels.npy", mmap_mode="r")  # (N,) float32
            self.sample_ids = np.load(folder / f"{split}.ids.npy")  # (N,) int64, row of flights.csv
        except (OSError, ValueError, EOFError) as error:
            raise _broken_cache(folder, error) from None

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """Contract, slice and cluster columns; read when first asked for, since training does not need it."""
        try:
            return pd.read_parquet(self._frame_path)
        except (OSError, ValueError) as error:
            raise _broken_cache(self._frame_path.parent, error) from None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Fetch rows: inputs (B, FEATURES), labels (B,) 1.0 for late (NaN: a live flight that never arrived), weights (B,) of one."""
        inputs, labels = (np.asarray(part[rows]) for part in (self.inputs, self.labels))
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), torch.ones(len(labels)))


def load_split(split: str) -> FlightsSplit:
    """Open a split, preparing it on the first call on this machine (some 10 s). Raises DataError when the data cannot be used."""
    if split not in (*SPLITS, LIVE):
        raise DataError(f"flights has no split '{split}'. Nothing was read. Ask for one of: {', '.join((*SPLITS, LIVE))}.")
    return FlightsSplit(live_folder() if split == LIVE else prepared_folder(), split)


def load_encoding() -> Encoding:
    """The encoding that the prepared splits were made with."""
    folder = prepared_folder()
    try:
        kept = json.loads((folder / "encoding.json").read_text())
        return Encoding(
            mean=tuple(kept["mean"]), std=tuple(kept["std"]), vocabulary={name: tuple(kept["vocabulary"][name]) for name in CATEGORIES}
        )
    except (OSError, ValueError, KeyError) as error:
        raise _broken_cache(folder, error) from None


def prepared_folder() -> Path:
    """Folder of the splits that a release trains on and judges by, named by the digests of the data and of the code that prepares it."""
    source = source_folder()
    return prepared_once(cache_folder() / f"flights-{_key(source)}", lambda building: _prepare(source, building))


def live_folder() -> Path:
    """Folder of the live split, encoded as the train split taught; a release never reads it."""
    source = source_folder()
    return prepared_once(cache_folder() / f"flights-live-{_key(source)}", lambda building: _prepare_live(source, building))


def _key(source: Path) -> str:
    code = [sha256_hex(Path(module.__file__ or "").read_bytes()) for module in (flights_source, flights_history, flights_features)]
    return digest([source_sha256(source), *code, sha256_hex(Path(__file__).read_bytes())])[:20]


def _prepare(source: Path, folder: Path) -> None:
    frame = contract_frame(read_tables(source))
    parts = {split: frame[frame["departure"].between(*PERIOD[split], inclusive="left")].reset_index(drop=True) for split in SPLITS}
    encoding = fit_encoding(parts["train"])
    (folder / "encoding.json").write_text(json.dumps(asdict(encoding)))
    for split, part in parts.items():
        _save(folder, split, part, encoding)


def _prepare_live(source: Path, folder: Path) -> None:
    _save(folder, LIVE, live_frame(read_tables(source)), load_encoding())


def _save(folder: Path, split: str, part: pd.DataFrame, encoding: Encoding) -> None:
    np.save(folder / f"{split}.inputs.npy", encode(part, encoding))
    np.save(folder / f"{split}.labels.npy", part["late"].to_numpy(np.float32))
    np.save(folder / f"{split}.ids.npy", part["sample_id"].to_numpy(np.int64))
    part.drop(columns="sample_id").to_parquet(folder / f"{split}.parquet", index=False)


def _broken_cache(folder: Path, error: Exception) -> DataError:
    return DataError(
        f"the prepared flights in {folder} cannot be read ({type(error).__name__}: {error}). They were cut short or altered after they "
        "were made, so nothing was started. Delete that folder; the next start prepares it again."
    )
