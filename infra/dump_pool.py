"""Many dump files -> columns, on every core when there is much to read.

A file is read in a process of its own kind with bounded memory as soon as there are many bytes or a pickle: a hostile or broken one can
then cost a message and nothing else.
"""

import contextlib
import gc
import multiprocessing
import resource
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from infra.dump_columns import to_columns
from infra.dump_raw import UnreadableDump, parse
from infra.dump_steps import StepRow
from validation.flight import Dump, Signature

MAX_BYTES = 256 * 2**20  # of one file; a full ring of 2,000 operations is about 1 MB, with stacks some MB
MANY_BYTES = 4 * 2**20  # from here on processes are worth their start
WORKER_BYTES = 2 * 2**30  # what one may take beyond what it starts with
WORKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What one file held."""

    dump: Dump | None = None
    world_size: int = 0
    host: str = ""
    steps: tuple[StepRow, ...] = ()
    is_cut: bool = False  # its newest operations are lost
    notes: tuple[str, ...] = ()  # ends of sentences that begin with the file's name; with no dump: why not


def read_files(files: Sequence[tuple[Path, int]]) -> list[Parsed]:
    """Read (path, rank by its name) pairs; one result a file, in the same order. Equal signatures and places are kept once for all."""
    sizes = [_size(path) for path, _ in files]
    if sum(sizes) < MANY_BYTES and not any(map(_is_foreign, (path for path, _ in files))):
        parsed = [read_file(*item) for item in files]
    else:
        parsed = _read_in_processes(files)
    return share_tables(parsed)


def read_file(path: Path, rank: int) -> Parsed:
    """Read one file; what is wrong with it is in the notes."""
    try:
        if (size := _size(path)) > MAX_BYTES:
            return Parsed(notes=(f"has {size / 2**20:.0f} MiB, more than the {MAX_BYTES // 2**20} MiB that are read of one dump",))
        raw = parse(path.read_bytes())
        found = to_columns(raw.document, rank)
    except OSError as error:
        return Parsed(notes=(f"cannot be read ({error.strerror})",))
    except (UnreadableDump, ValueError) as error:
        return Parsed(notes=(f"{error}",))
    except MemoryError:
        return Parsed(notes=("takes more memory than a dump can need",))
    except Exception as error:  # whatever a hostile document leads to is that file's fault, and the others are still to be read
        return Parsed(notes=(f"is no dump that can be understood ({type(error).__name__}: {error})",))
    notes = (*([raw.note] if raw.note else ()), *found.notes)
    return Parsed(dump=found.dump, world_size=found.world_size, host=found.host, steps=found.steps, is_cut=raw.is_cut, notes=notes)


def share_tables(parsed: Sequence[Parsed]) -> list[Parsed]:
    """Let all dumps number signatures and places alike, in one table each, so that ranks are compared by numbers."""
    signatures: dict[Signature, int] = {}
    places: dict[str, int] = {}
    renumbered = []
    for item in parsed:
        if item.dump is not None:
            to_shared = np.array([signatures.setdefault(one, len(signatures)) for one in item.dump.signatures], dtype=np.int32)
            to_places = np.array([places.setdefault(one, len(places)) for one in item.dump.places], dtype=np.int32)
            place = None if item.dump.place is None else to_places[item.dump.place]
            item = replace(item, dump=replace(item.dump, signature=to_shared[item.dump.signature], place=place))
        renumbered.append(item)
    table, sites = tuple(signatures), tuple(places)
    return [
        item if item.dump is None else replace(item, dump=replace(item.dump, signatures=table, places=sites if item.dump.places else ()))
        for item in renumbered
    ]


def _read_in_processes(files: Sequence[tuple[Path, int]]) -> list[Parsed]:
    paths, ranks = [path for path, _ in files], [rank for _, rank in files]
    workers = min(WORKERS, len(files))
    found: list[Parsed] = []
    with contextlib.suppress(BrokenProcessPool), _pool(workers) as pool:
        found.extend(pool.map(read_file, paths, ranks, chunksize=max(1, min(4, len(files) // (2 * workers)))))
    return found + [_read_alone(*item) for item in files[len(found) :]]


def _read_alone(path: Path, rank: int) -> Parsed:
    """After a worker died: each remaining file in a process of its own, so that only the one that kills it is lost."""
    try:
        with _pool(1) as pool:
            return pool.submit(read_file, path, rank).result()
    except BrokenProcessPool:
        return Parsed(notes=("ended the process that read it, so it was left out",))


def _pool(workers: int) -> ProcessPoolExecutor:
    """Forked while this process has one thread: numpy and pandas are there already. Beside other threads a fork could lock up."""
    context = multiprocessing.get_context("fork" if threading.active_count() == 1 else "spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_reader)


def _prepare_reader() -> None:
    """Let a reader have so much memory and no more; documents have no cycles, so looking for them is a third of the time for nothing."""
    gc.disable()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + WORKER_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_foreign(path: Path) -> bool:
    """Not JSON by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip(b" \t\r\n\xef\xbb\xbf")[:1] not in (b"{", b"[", b"")
    except OSError:
        return False
