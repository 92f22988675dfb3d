"""Tables of times: traces with their meta file, timelines."""

from pathlib import Path

import numpy as np
import pytest
from helpers_traces import timeline, trace

from infra.timelines import read_timeline
from infra.traces import read_traces
from validation.errors import DataError
from validation.records import TIMELINE_COLUMNS


def test_a_trace_is_read_with_the_sizes_beside_it(tmp_path: Path) -> None:
    """They are of the same name; several traces come by name."""
    for name in ("ST", "AR"):
        trace().to_parquet(tmp_path / f"trace-{name}.parquet")
    (tmp_path / "meta-AR.yaml").write_text("dp_size: 4\npp_size: 1\n")

    traces, problems = read_traces([tmp_path / "trace-ST.parquet", tmp_path / "trace-AR.parquet"])

    assert [(one.name, one.sizes, len(one.table)) for one in traces] == [("AR", {"dp_size": 4, "pp_size": 1}, 48), ("ST", {}, 48)]
    assert problems == []


@pytest.mark.parametrize("text", ["- a list", "key: [unclosed", "!!python/object/apply:os.system ['true']"])
def test_a_meta_file_that_is_none_is_said(tmp_path: Path, text: str) -> None:
    """The trace itself tells its sizes; nothing in the file is executed."""
    trace().to_parquet(tmp_path / "trace-AR.parquet")
    (tmp_path / "meta-AR.yaml").write_text(text)

    traces, problems = read_traces([tmp_path / "trace-AR.parquet"])

    assert traces[0].sizes == {}
    assert problems[0].startswith("meta-AR.yaml")


def test_a_table_that_is_none_is_left_out(tmp_path: Path) -> None:
    """The others are read."""
    trace().to_parquet(tmp_path / "trace-AR.parquet")
    (tmp_path / "trace-ST.parquet").write_bytes(b"PAR1 rubbish PAR1")

    traces, problems = read_traces(sorted(tmp_path.glob("*.parquet")))

    assert [one.name for one in traces] == ["AR"]
    assert "trace-ST.parquet cannot be read as a Parquet table" in problems[0]


def test_a_timeline_is_read_as_it_stands(tmp_path: Path) -> None:
    """Rows in their order, block by block; columns that are no timeline's are left out."""
    given = timeline().assign(gc_ms=0.5)
    given.to_parquet(tmp_path / "timeline.parquet", row_group_size=3)

    table = read_timeline(tmp_path / "timeline.parquet")

    assert tuple(table.columns) == TIMELINE_COLUMNS
    assert all(np.allclose(table[name], given[name]) for name in TIMELINE_COLUMNS)


def test_a_timeline_of_other_things_than_numbers_is_refused(tmp_path: Path) -> None:
    """A rank that is not there is no rank, and a word no time."""
    given = timeline()
    for number, wrong in enumerate([
        given.assign(rank=given["rank"].astype("Int64").where(given.index != 1)), given.assign(wait_ms=["long"] * len(given)),
    ]):  # fmt: skip
        path = tmp_path / f"timeline-{number}.parquet"
        wrong.to_parquet(path)

        with pytest.raises(DataError, match="cannot be read as a timeline"):
            read_timeline(path)


def test_a_timeline_without_its_columns_is_refused(tmp_path: Path) -> None:
    """It says which."""
    timeline().drop(columns=["wait_ms"]).to_parquet(tmp_path / "timeline.parquet")

    with pytest.raises(DataError, match="lacks the columns wait_ms"):
        read_timeline(tmp_path / "timeline.parquet")
