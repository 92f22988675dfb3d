"""Journal and pointer operations on the local folder: milliseconds each, beside MLflow's alias operations.

    python benchmarks/store_operations.py [--json] [--quick]

Ours, each in a store that grows as a real one does: append a journal record (25 a release, read back and verified at the first), read and
move the pointer, put and get 64 KiB of evidence; on a local folder, every write flushed to the disk, and through boto3 against moto's S3
server on this machine. `ratio` is the slowest of the folder's 95th percentiles in ms; the goal is 20. The peer is what MLflow does for the
same purpose, in the same run: set an alias and read it back on SQLite, with 25 versions. The samples hold every operation on each store,
and what the disk takes for a file and its folder to be flushed: an append is two of them, a put or a move one.

Limits: one process; the disk is this machine's, and a flush there may cost less or more than elsewhere; moto's server is Python in this
process, so its times bound a client's work, not a cloud's. Lower is better.
"""

import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from support.output import Document, Sample, parser, progress, publish

from infra.journal import Journal
from infra.pointer import Pointer, move_pointer, read_pointer
from infra.settings import load_settings
from infra.store import ObjectStore, get_blob, open_store, put_blob
from infra.store_files import sync_folder

GOAL_MS = 20.0
RECORDS = 25  # a release
VERSIONS = 25
EVIDENCE_BYTES = 64 * 2**10
NOW = "2026-01-01T00:00:00+00:00"
PAYLOAD = {"gate": "scaling", "outcome": "pass", "reason": "efficiency at W=8 is 0.61, has to be at least 0.5" * 4, "evidence": "e" * 64}
DISK, FOLDER, MOTO, PEER = "plain files", "folder", "S3 (moto)", "MLflow on SQLite"


def main() -> int:
    """Measure, print."""
    arguments = parser(__doc__ or "").parse_args()
    releases = 2 if arguments.quick else 40
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        rows = [flushes(home, releases * RECORDS)]
        rows += operations(FOLDER, open_store(load_settings(home=home / "local")), releases)
        with moto(home) as store:
            rows += operations(MOTO, store, max(2, releases // 4))
        rows += mlflow_aliases(home / "mlflow", releases * RECORDS // 10)
    ours = [row for row in rows if row["store"] == FOLDER]
    worst = max(ours, key=lambda row: row["p95_ms"])
    reading, writing = (_median(rows, PEER, name) for name in ("read the alias", "set an alias"))
    moving = _median(rows, FOLDER, "move the pointer")
    progress(f"MLflow sets an alias in {writing:.2f} ms and reads it in {reading:.2f} ms; the pointer moves in {moving:.2f} ms")
    document = Document(
        name="store_operations",
        peer=f"the goal; MLflow sets an alias in {writing / moving:.2f} times the pointer's move (medians), without compare-and-set",
        ratio=worst["p95_ms"], goal=GOAL_MS, met=worst["p95_ms"] <= GOAL_MS, unit="ms, p95 of the slowest operation on a local folder",
        samples=rows,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


def operations(name: str, store: ObjectStore, releases: int) -> list[Sample]:
    """Every operation on one store, as a series of releases does them."""
    times: dict[str, list[float]] = {}
    pointer = Pointer(
        model="boat", serving_version="1", serving_kind="candidate", last_known_good="", baseline="1", release_id="r", sequence=1
    )  # fmt: skip
    move_pointer(store, pointer, None)
    for number in range(releases):
        journal = Journal(store, f"boat-20260101-{number:06d}-aaaa")
        for record in range(RECORDS):
            _timed(
                times,
                "append a record",
                lambda journal=journal, record=record: journal.append("gate", PAYLOAD | {"attempt": record}, time_utc=NOW),
            )
            body = os.urandom(EVIDENCE_BYTES)
            digest = _timed(times, "put evidence", lambda body=body: put_blob(store, body))
            _timed(times, "get evidence", lambda digest=digest: get_blob(store, digest))
            found, etag = _timed(times, "read the pointer", lambda: read_pointer(store, "boat"))
            moved = replace(found, sequence=found.sequence + 1)
            _timed(times, "move the pointer", lambda moved=moved, etag=etag: move_pointer(store, moved, etag))
        progress(f"{name}: release {number + 1} of {releases}")
    return [_sample(name, operation, taken) for operation, taken in times.items()]


def flushes(home: Path, count: int) -> Sample:
    """A new file with a record's bytes and its folder, flushed: what the disk asks of everybody."""
    times: dict[str, list[float]] = {}

    def write(path: Path) -> None:
        with path.open("xb") as file:
            file.write(b"x" * 400)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)

    for number in range(count):
        _timed(times, "write and flush", lambda number=number: write(home / f"plain-{number}"))
    return _sample(DISK, "write and flush", times["write and flush"])


def mlflow_aliases(home: Path, count: int) -> list[Sample]:
    """The peer: an alias is set and read back."""
    from mlflow import MlflowClient

    home.mkdir()
    client = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db", registry_uri=f"sqlite:///{home}/mlflow.db")
    client.create_registered_model("boat")
    for _ in range(VERSIONS):
        client.create_model_version("boat", (home / "model").as_uri())
    times: dict[str, list[float]] = {}
    for number in range(count):
        _timed(times, "set an alias", lambda n=number: client.set_registered_model_alias("boat", "champion", str(1 + n % VERSIONS)))
        _timed(times, "read the alias", lambda: client.get_model_version_by_alias("boat", "champion"))
    return [_sample(PEER, operation, taken) for operation, taken in times.items()]


@contextmanager
def moto(home: Path) -> Iterator[ObjectStore]:
    """A store in a bucket of a server on a free loopback port."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it tells every request
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="trial")
        yield open_store(load_settings(home=home / "s3", store="s3://trial/x", store_endpoint=endpoint, store_region="us-east-1"))
    finally:
        server.stop()


def _timed(times: dict[str, list[float]], name: str, act: Callable[[], object]):  # type: ignore[no-untyped-def]
    began = time.perf_counter()
    result = act()
    times.setdefault(name, []).append(1000 * (time.perf_counter() - began))
    return result


def _sample(store: str, operation: str, taken: list[float]) -> Sample:
    p50, p95 = (float(np.quantile(taken, q)) for q in (0.5, 0.95))
    return {"store": store, "operation": operation, "count": len(taken), "p50_ms": p50, "p95_ms": p95, "max_ms": max(taken)}


def _median(rows: list[Sample], store: str, operation: str) -> float:
    return statistics.median(row["p50_ms"] for row in rows if (row["store"], row["operation"]) == (store, operation))


if __name__ == "__main__":
    sys.exit(main())
