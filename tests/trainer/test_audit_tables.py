"""An audited run's tables: merged over attempts by lineage, and with their columns also when nothing was audited."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from trainer.audit_tables import AUDIT_TABLES, WORKERS_FILE, merged
from trainer.merge import lineage
from trainer.parts import PartWriter, part_folder, read_parts
from validation.canonical import canonical_json


def left(folder: Path, attempt: int, rank: int, resumed_from: int, steps: range) -> PartWriter:
    """What an audited rank of two leaves of some steps."""
    part = PartWriter(part_folder(folder, attempt, rank))
    part.write("start", {"resumed_from_step": resumed_from, "world_size": 2})
    mark = f"{attempt}{rank}"
    for step in steps:
        part.add_line("consumed", {"step": step, "micro": 0, "sample_ids": "7 5", "contents": "a b", "poisoned": step == 2})
        for stage in ("reduced", "weight"):
            part.add_line("digests", {"step": step, "stage": stage, "tensor": "fc", "sha256": f"{mark}{step}"})
        part.add_line("streams", {"step": step, "drawer": "model", "generator": "torch", "state": f"{mark}{step}"})
        part.add_line("updates", {
            "step": step, "rates": "[0.1]", "norm": float("nan"), "limit": float("inf"), "moved": 1.0, "still": "[]", "weight": 2.0,
            "loss": 0.5,
        })  # fmt: skip
    part.add_line("states", {"step": resumed_from, "moment": "loaded", "names": {"plain/step": mark, "weight/fc": mark}})
    part.add_line("collectives", {"operation": "all_reduce", "dtype": "float32", "calls": 3, "elements": 12})
    part.flush()
    draws = [{"step": resumed_from, "drawer": "data", "generator": "numpy", "state": f"{mark}{number}"} for number in (1, 0)]
    (part.folder / f"{WORKERS_FILE}.jsonl").write_bytes(b"".join(canonical_json(draw) + b"\n" for draw in draws) + b'{"step":')
    return part


def read_back(name: str, folder: Path) -> pd.DataFrame:
    parts = read_parts(folder)
    return merged(name, parts, lineage(parts))


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, pd.DataFrame]:
    """Of a run that died in step 4 and went on from step 2."""
    for rank in (0, 1):
        left(tmp_path, 0, rank, 0, range(5))
        left(tmp_path, 1, rank, 2, range(2, 6))
    return {name: read_back(name, tmp_path) for name in AUDIT_TABLES}


def test_lost_steps_do_not_count(tables: dict[str, pd.DataFrame]) -> None:
    """Each step of each rank counts once, as it was done last, in the order of steps and ranks."""
    for name in ("updates", "consumed", "digests"):
        each = 1 if name == "updates" else 2
        assert list(zip(tables[name]["step"], tables[name]["rank"], strict=True)) == [
            (step, rank) for step in range(6) for rank in (0, 1) for _ in range(each)
        ]
    first = tables["digests"].query("rank == 0 and stage == 'weight'")
    assert first["sha256"].tolist() == ["000", "001", "102", "103", "104", "105"]
    assert tables["streams"].query("drawer == 'model' and rank == 1")["state"].tolist() == ["010", "011", "112", "113", "114", "115"]


def test_samples_have_a_row_each(tables: dict[str, pd.DataFrame]) -> None:
    """Ids and contents stay in the order in which they were consumed."""
    rows = tables["consumed"].query("step == 2 and rank == 1")

    assert rows["sample_id"].tolist() == [7, 5]
    assert rows["content"].tolist() == ["a", "b"]
    assert rows["poisoned"].tolist() == [True, True]
    assert tables["consumed"]["poisoned"].sum() == 4


def test_draws_of_workers_count_where_nothing_was_lost(tables: dict[str, pd.DataFrame]) -> None:
    """Which draws of workers were lost with an attempt is not known, so those of the last one count, a torn line aside."""
    rows = tables["streams"].query("drawer == 'data'")

    assert list(zip(rows["rank"], rows["state"], strict=True)) == [(0, "100"), (0, "101"), (1, "110"), (1, "111")]


def test_states_keep_every_attempt(tables: dict[str, pd.DataFrame]) -> None:
    """A state that was loaded is compared with one that was saved before: both are there, and collectives are those of the last attempt."""
    rows = tables["states"]

    assert list(zip(rows["attempt"], rows["rank"], rows["step"], strict=True)) == [
        (attempt, rank, step) for attempt, step in ((0, 0), (1, 2)) for rank in (0, 1) for _ in range(2)
    ]  # fmt: skip
    assert rows["name"].tolist() == ["plain/step", "weight/fc"] * 4
    assert tables["collectives"].to_dict("list") == {
        "rank": [0, 1], "operation": ["all_reduce"] * 2, "dtype": ["float32"] * 2, "calls": [3, 3], "elements": [12, 12],
    }  # fmt: skip


def test_numbers_without_a_json_form_come_back(tables: dict[str, pd.DataFrame]) -> None:
    """Not a number and infinity are floats again."""
    assert tables["updates"]["norm"].isna().all()
    assert (tables["updates"]["limit"] == float("inf")).all()


@pytest.mark.parametrize("name", AUDIT_TABLES)
def test_empty_tables_have_their_columns(name: str, tables: dict[str, Any]) -> None:
    """A run that nobody audited has the same columns of the same types, and no rows."""
    empty = merged(name, [], {})

    assert tuple(empty.columns) == AUDIT_TABLES[name].columns == tuple(tables[name].columns)
    assert empty.empty
    assert empty.dtypes.equals(tables[name].dtypes)


def test_rows_without_a_stage_are_reduced_gradients(tmp_path: Path) -> None:
    """Runs of before go on: what they left were the reduced gradients."""
    part = left(tmp_path, 0, 0, 0, range(0))
    part.add_line("digests", {"step": 0, "tensor": "fc", "sha256": "x"})
    part.flush()

    assert read_back("digests", tmp_path)["stage"].tolist() == ["reduced"]
