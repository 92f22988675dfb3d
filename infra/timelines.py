"""Reading a timeline of any size: a block at a time, times as float32, so that memory is the table's own."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from validation.errors import DataError
from validation.records import TIMELINE_COLUMNS


def read_timeline(path: Path) -> pd.DataFrame:
    """Read TIMELINE_COLUMNS of a Parquet file, in the order of its rows.

    A time in float32 ms is 1e-7 fine: 10 us in a step of 100 s. Whole tables would pass through memory three times (10.5 million rows: 3 GB
    and three times the processor time).
    Raises: DataError when it is no table, lacks a column or holds other than numbers.
    """
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in TIMELINE_COLUMNS if name not in file.schema_arrow.names]
            if not missing:
                return _columns(file)
    except Exception as error:  # pyarrow raises errors of its own for rubbish
        raise DataError(f"{path.name} cannot be read as a timeline ({type(error).__name__}) and was left out. Copy it again.") from None
    raise DataError(
        f"{path.name} lacks the columns {', '.join(missing)} of a timeline, so it was left out. Give a timeline that `seatrial train` "
        "wrote, or a trace-NAME.parquet."
    )


def _columns(file: pq.ParquetFile) -> pd.DataFrame:
    rows, at = file.metadata.num_rows, 0
    columns = {name: np.empty(rows, dtype=np.float32 if name.endswith("_ms") else np.int64) for name in TIMELINE_COLUMNS}
    for group in range(file.num_row_groups):
        block = file.read_row_group(group, columns=list(TIMELINE_COLUMNS), use_threads=False)
        for name, values in columns.items():
            column = block.column(name).cast(pa.from_numpy_dtype(values.dtype))
            if column.null_count and values.dtype == np.int64:
                raise ValueError(f"{name} has gaps")
            values[at : at + block.num_rows] = column.to_numpy()
        at += block.num_rows
    return pd.DataFrame(columns, copy=False)
