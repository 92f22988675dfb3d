"""Where a run stands in the object store, and reading what stands there.

runs/<run>/newest                                        {step, manifest_sha256}: the newest checkpoint that was ever complete here
runs/<run>/checkpoints/step-00000010/<file>              the checkpoint's files; a name that begins with a dot gets a "_" in front
runs/<run>/checkpoints/step-00000010/PARTS.json          signed: how many bytes of each row file belong to it, and their sha256
runs/<run>/checkpoints/step-00000010/MANIFEST.json       comes last: without it there is no checkpoint
runs/<run>/<row file>/<first byte>-<end byte>            job.json, group.jsonl, parts/...: append-only, each byte once
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.store import NotFoundError, ObjectStore
from validation.errors import ConfigError, StoreError
from validation.manifest import MANIFEST

PARTS = "PARTS.json"
KEEP = 2  # complete checkpoints; the older one is the way back when the newest is damaged
RUN_FILES = ("job.json", "group.jsonl")  # beside parts/: what the run is, and what became of its attempts

_STEP = re.compile(r"step-(\d{8,})")
_SEGMENT = re.compile(r"(\d+)-(\d+)")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Bytes [first, end) of a row file."""

    first: int
    end: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The newest checkpoint that was ever complete in the store."""

    step: int
    manifest_sha256: str


def checked_run(name: str) -> str:
    """Return a run's name, or raise ConfigError when it cannot name a folder and a place in a store."""
    if _RUN.fullmatch(name) and not name.endswith(".partial"):
        return name
    raise ConfigError(
        f"'{name[:80]}' cannot name a run, so nothing was started. Use 1 to 64 letters, digits, dots, dashes and underscores, beginning "
        "with a letter or a digit."
    )


def step_of(folder_name: str) -> int | None:
    """The step of a sealed checkpoint's folder; None for any other name, such as that of a partial one."""
    match = _STEP.fullmatch(folder_name)
    return int(match[1]) if match else None


def checkpoint_prefix(run: str, step: int) -> str:
    """Key prefix of a checkpoint, with the final slash."""
    return f"runs/{run}/checkpoints/step-{step:08d}/"


def file_key(run: str, step: int, name: str) -> str:
    """Key of a checkpoint's file. No key segment may begin with a dot, as `.metadata` does; the mapping keeps names apart."""
    return checkpoint_prefix(run, step) + (f"_{name}" if name.lstrip("_").startswith(".") else name)


def stored_steps(store: ObjectStore, run: str) -> dict[int, bool]:
    """Step -> whether its manifest stands, of everything under the run's checkpoints."""
    found: dict[int, bool] = {}
    for key in store.list(f"runs/{run}/checkpoints/"):
        folder, _, name = key.removeprefix(f"runs/{run}/checkpoints/").partition("/")
        if (step := step_of(folder)) is not None:
            found[step] = found.get(step, False) or name == MANIFEST
    return found


def stored_segments(store: ObjectStore, run: str) -> dict[str, list[Segment]]:
    """Row file, relative to the run's folder -> its segments, each beginning where the one before ends; from the first gap on none."""
    every: dict[str, list[Segment]] = {}
    for key in (*store.list(f"runs/{run}/parts/"), *(key for name in RUN_FILES for key in store.list(f"runs/{run}/{name}/"))):
        file, _, span = key.removeprefix(f"runs/{run}/").rpartition("/")
        if match := _SEGMENT.fullmatch(span):
            every.setdefault(file, []).append(Segment(first=int(match[1]), end=int(match[2]), key=key))
    return {file: _joined(segments) for file, segments in sorted(every.items())}


def _joined(segments: list[Segment]) -> list[Segment]:
    """Without what overlaps: an upload whose answer was lost may have been repeated with more bytes."""
    chain: list[Segment] = []
    for segment in sorted(segments, key=lambda item: (item.first, item.end)):
        if segment.first == (chain[-1].end if chain else 0):
            chain.append(segment)
    return chain


def row_files(folder: Path) -> list[Path]:
    """Files of a run's folder that only grow: what its attempts left, in a fixed order."""
    parts = (path for path in folder.glob("parts/**/*") if path.is_file() and path.suffix != ".partial")
    return [path for path in (*(folder / name for name in RUN_FILES), *sorted(parts)) if path.is_file()]


def read_claim(store: ObjectStore, run: str) -> tuple[Claim | None, str | None]:
    """The claim and its etag; (None, None) when the store never had a checkpoint of this run. Raises StoreError when it is no claim."""
    key = f"runs/{run}/newest"
    try:
        body, etag = store.get_with_etag(key)
    except NotFoundError:
        return None, None
    try:
        facts: Mapping[str, object] = json.loads(body)
        return Claim(step=int(str(facts["step"])), manifest_sha256=str(facts["manifest_sha256"])), etag
    except (ValueError, KeyError, TypeError):
        raise StoreError(
            f"'{key}' is no claim of a checkpoint. How new the newest checkpoint has to be is not known, so nothing was taken. Look at the "
            "object and who wrote it; when it is deleted, the newest checkpoint that verifies counts."
        ) from None


def stored_job(store: ObjectStore, run: str) -> bytes | None:
    """job.json of a run in the store, or None when there is no such run."""
    segments = stored_segments(store, run).get("job.json")
    return b"".join(store.get(segment.key) for segment in segments) if segments else None
