"""A run's folder made by hand: sealed checkpoints and growing rows, as a trainer leaves them."""

import random
from pathlib import Path

from infra.mirror import Mirror
from infra.mirror_fetch import Fetched, fetch
from infra.store import ObjectStore
from validation.canonical import sha256_hex
from validation.manifest import MANIFEST, FileSeal, Manifest, build_manifest

KEY = b"k" * 32
RUN = "night"


def make_run(folder: Path, steps: int = 0) -> Path:
    """A run with its job and one rank's rows; a checkpoint every ten steps up to `steps`."""
    (folder / "parts" / "attempt-0" / "rank-0").mkdir(parents=True)
    (folder / "job.json").write_bytes(b'{"recipe":"tiny"}')
    (folder / "parts" / "attempt-0" / "rank-0" / "start.json").write_bytes(b"{}")
    for step in range(10, steps + 1, 10):
        train(folder, step)
    return folder


def train(folder: Path, step: int, *, size: int = 3000, key: bytes = KEY) -> Path:
    """Leave the rows up to `step`, then its sealed checkpoint."""
    with (folder / "parts" / "attempt-0" / "rank-0" / "ledger.bin").open("ab") as ledger:
        ledger.write(b"%08d" % step * 40)
    sealed = folder / "checkpoints" / f"step-{step:08d}"
    sealed.mkdir(parents=True)
    bodies = {".metadata": b"pickle", "__0_0.distcp": random.Random(step).randbytes(size), "state.json": b"{}"}
    for name, body in bodies.items():
        (sealed / name).write_bytes(body)
    files = {name: FileSeal(bytes=len(body), sha256=sha256_hex(body)) for name, body in bodies.items()}
    (sealed / MANIFEST).write_bytes(build_manifest(Manifest(step=step, run={"recipe": "tiny"}, files=files), key))
    return sealed


def mirror(store: ObjectStore, folder: Path, **given: object) -> Mirror:
    """A mirror that has synced once."""
    made = Mirror(store, folder, RUN, key=KEY, **given)  # type: ignore[arg-type]
    made.sync()
    return made


def bring(store: ObjectStore, folder: Path, *, key: bytes = KEY) -> Fetched:
    """Fetch the run into a folder."""
    return fetch(store, RUN, folder, key=key)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flip(store: ObjectStore, key: str) -> None:
    """Change one byte of an object behind everybody's back."""
    body = store.get(key)
    store.delete(key)
    store.put_new(key, bytes([body[0] ^ 1]) + body[1:])
