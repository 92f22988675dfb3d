"""One document of what a rank recorded: its ring and torch's flight recorder laid over each other, in the recorder's own form. Torch-free.

The ring knows who, why and where, and every send and recv; torch's recorder knows what C++ began by itself (buckets of DDP, functional
collectives), and on NCCL what the device started and completed. An operation in both is one entry, told in the ring's words.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trainer.recorded_layout import PHASES
from trainer.recorded_reading import Recorded, RingReader
from validation.flight import Marker

VERSION = 1
SLACK_NS = 2_000_000  # between the two stamps of one operation: a thread may lose the processor in between
UNSEEN = frozenset({"monitored_barrier"})  # never among torch's own records
STEPS_KEPT = 256  # of the steps that are over, the newest

Entry = dict[str, Any]


def document(reader: RingReader, torchs: Mapping[str, Any] | None, *, taken_ns: int) -> dict[str, Any]:
    """What one rank did, as torch's flight recorder would write it, with what it lacks.

    Args: torchs, the recorder's own JSON; None where it could not be had: the ring alone then.
    Returns: the recorder's keys; per entry also reduce_op, root, peer, tag, step, micro, phase, where, left_ns, failed; and `sea_trial`.
    """
    marker, recorded = reader.marker(), reader.operations()
    groups = reader.groups() | {entry.group.name: entry.group for entry in recorded}
    theirs = _Theirs(torchs.get("entries", ()) if torchs else ())
    entries = [_laid_over(entry, theirs.take(entry), marker) for entry in recorded]
    entries += [_theirs_alone(entry, reader) for entry in theirs.left()]
    entries.sort(key=lambda entry: int(entry["time_created_ns"]))
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    owner, is_wrapped = reader.owner(), (bool(recorded) and recorded[0].serial > 1) or theirs.is_wrapped
    kept = {key: value for key, value in torchs.items() if key not in ("entries", "pg_config")} if torchs else {"version": "2.10"}
    return {
        **kept,
        "pg_config": {name: {"name": name, "desc": group.description, "ranks": str(list(group.ranks))} for name, group in groups.items()},
        "entries": entries,
        "sea_trial": {
            "version": VERSION, "rank": owner.rank, "world_size": owner.world_size, "taken_ns": taken_ns, "wrapped": is_wrapped,
            "groups": {name: {"ranks": group.ranks, "description": group.description} for name, group in groups.items()},
            "marker": marker._asdict(), "has_torchs": torchs is not None,
            "between": [between._asdict() for between in reader.events()], "steps": _steps(reader),
        },
    }  # fmt: skip


class _Theirs:
    """Torch's entries of one rank, each of which is taken by one of the ring's at most."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        whole = [entry for entry in entries if {"process_group", "profiling_name", "time_created_ns"} <= entry.keys()]
        # without a name: the helper groups in which TORCH_DISTRIBUTED_DEBUG=DETAIL checks each operation and then makes it
        self._entries = [entry for entry in whole if entry["process_group"][0]]
        self._of: dict[tuple[str, bool], list[int]] = defaultdict(list)
        for place, entry in enumerate(self._entries):
            self._of[entry["process_group"][0], bool(entry.get("is_p2p"))].append(place)
        self._times = {key: [int(self._entries[place]["time_created_ns"]) for place in places] for key, places in self._of.items()}
        self._by_seq = {
            (name, int(self._entries[place].get("collective_seq_id", 0))): place
            for (name, is_p2p), places in self._of.items() if not is_p2p for place in places
        }  # fmt: skip
        self._taken: set[int] = set()
        self.is_wrapped = bool(self._entries) and int(self._entries[0].get("record_id", 0)) > 0

    def take(self, mine: Recorded) -> Entry | None:
        """Their entry of the same operation: of the same number, or the first one that was stamped while it was begun."""
        if mine.signature.op in UNSEEN:
            return None
        place = None if mine.is_p2p else self._by_seq.get((mine.group.name, mine.seq))
        if place is None or place in self._taken or not self._fits(mine, place):
            place = self._next(mine)
        if place is None:
            return None
        self._taken.add(place)
        return self._entries[place]

    def _next(self, mine: Recorded) -> int | None:
        key = (mine.group.name, mine.is_p2p)
        places = self._of.get(key, [])
        for at in range(bisect_left(self._times.get(key, []), mine.created_ns), len(places)):
            if not self._fits(mine, places[at]):
                return None
            if places[at] not in self._taken:
                return places[at]
        return None

    def _fits(self, mine: Recorded, place: int) -> bool:
        if not _is_same(mine.signature.op, str(self._entries[place]["profiling_name"])):
            return False
        stamp = int(self._entries[place]["time_created_ns"])
        until = mine.left_ns if mine.left_ns and not mine.is_failed else mine.created_ns + SLACK_NS
        return mine.created_ns - SLACK_NS <= stamp <= max(until, mine.created_ns) + SLACK_NS

    def left(self) -> list[Entry]:
        """Those that no ring's entry took: C++ began them."""
        return [entry for place, entry in enumerate(self._entries) if place not in self._taken]


def _is_same(op: str, theirs: str) -> bool:
    """Whether a backend's name is that of an operation: "gloo:all_reduce", "nccl:_all_gather_base", "nccl:send 0->1"."""
    mine, name = op.replace("_", ""), theirs.rpartition(":")[2].replace("_", "").lower()
    return name.startswith(mine) or (op == "barrier" and name.endswith("barrier")) or (op == "reduce_scatter" and name == "allreduce")


def _laid_over(mine: Recorded, theirs: Entry | None, marker: Marker) -> Entry:
    op, sizes, dtypes, output_sizes, output_dtypes, reduce_op, root, peer, tag = mine.signature
    is_over = mine.is_over(marker)
    if theirs is not None and "nccl" in mine.backend:
        is_over = bool(theirs.get("retired"))  # the host's wait is not the device's end
    elif theirs is not None:
        is_over = (is_over or bool(theirs.get("retired"))) and not mine.is_failed
    backend = str(theirs["profiling_name"]).rpartition(":")[0] if theirs else mine.backend
    own = {
        "process_group": [mine.group.name, mine.group.description], "profiling_name": f"{backend}:{op}" if backend else op,
        "is_p2p": mine.is_p2p, "time_created_ns": mine.created_ns, "retired": is_over,
        "input_sizes": sizes, "input_dtypes": dtypes, "output_sizes": output_sizes, "output_dtypes": output_dtypes,
        "reduce_op": reduce_op, "root": root, "peer": peer, "tag": tag, "step": mine.step, "micro": mine.micro, "phase": mine.phase,
        "where": mine.place, "left_ns": mine.left_ns, "failed": mine.is_failed, "thread_id": str(mine.thread),
    }  # fmt: skip
    if theirs is not None:
        return {**theirs, **own}
    seq = {"p2p_seq_id": mine.seq, "collective_seq_id": 0} if mine.is_p2p else {"p2p_seq_id": 0, "collective_seq_id": mine.seq}
    times = {"state": "scheduled", "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "timeout_ms": 0}
    return {"pg_id": 0, "op_id": 0, **seq, **times, **own}


def _theirs_alone(entry: Entry, reader: RingReader) -> Entry:
    """What C++ began: its step by the time of its beginning."""
    lacking = {"reduce_op": "", "root": -1, "peer": -1, "tag": 0, "micro": -1, "phase": "", "where": "", "left_ns": 0, "failed": False}
    return {**entry, **lacking, "step": _step_at(reader, int(entry["time_created_ns"]))}


def _step_at(reader: RingReader, moment_ns: int) -> int:
    rows = reader.steps()
    place = int(np.searchsorted(rows["start_ns"], moment_ns, side="right")) - 1
    if place >= 0 and moment_ns <= rows["end_ns"][place]:
        return int(rows["step"][place])
    return reader.marker().step if len(rows) == 0 or moment_ns > rows["end_ns"][-1] else -1


def _steps(reader: RingReader) -> list[Entry]:
    """The newest steps that are over; ms by phase, and how much of it was spent inside of operations."""
    rows = reader.steps()[-STEPS_KEPT:]
    return [
        {
            "step": step, "start_ns": start, "arrival_ns": arrival, "end_ns": end, "gc_ms": gc / 1e6,
            "phase_ms": {name: ns / 1e6 for name, ns in zip(PHASES, phase, strict=True) if ns},
            "inside_ms": {name: ns / 1e6 for name, ns in zip(PHASES, inside, strict=True) if ns},
        }
        for _, step, start, arrival, end, phase, inside, gc, _ in rows.tolist()
    ]  # fmt: skip
