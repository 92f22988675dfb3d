"""A flight recorder's document -> compact columns, `validation.flight.Dump`.

Keys that a version lacks are tolerated; those that our own recorder adds (reduce_op, root, peer, tag, step, where, left_ns and the
document's "sea_trial") are used where they stand. N = entries.
"""

import marshal
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from infra.dump_steps import StepRow, step_rows
from validation.flight import DEFAULT_GROUP, P2P, Dump, Group, Marker, Signature

Entry = Mapping[str, Any]
KNOWN_VERSION = 2  # major number of torch's schema, in 2.x
INT64_MAX = 2**63 - 1
_PEERS = re.compile(r"(\d+)\s*(->|<-)\s*(\d+)")  # NCCL writes "nccl:send 0->1" and "nccl:recv 0<-1", numbers within the group
_NUMBER = re.compile(r"\d+")
_OF_TORCH = re.compile(r"(^|/)torch/(distributed|_|nn|autograd|utils|cuda|csrc|fx|optim)|(^|/)(site|dist)-packages/torch/|\.(cpp|h|cu)$")


@dataclass(frozen=True, slots=True)
class Columns:
    """A dump, and what else its file said."""

    dump: Dump
    world_size: int  # as the file knows it, 0 = it does not
    host: str
    notes: tuple[str, ...]  # ends of sentences
    steps: tuple[StepRow, ...]  # that our own recorder wrote


def to_columns(document: Mapping[str, Any], rank: int) -> Columns:
    """One file's document as columns; entries in the order in which they were issued.

    Args: document, with a list of dicts under "entries"; rank, that the file's name tells, -1 = none.
    Raises: ValueError when neither the file nor its name says which rank it is.
    """
    own = _mapping(document.get("sea_trial"))
    rank = _int(own.get("rank"), rank)
    if rank < 0:
        raise ValueError("does not say which rank it is, and neither does its name")
    entries = document["entries"]
    records = _ints([entry.get("record_id") for entry in entries], -1)
    if len(records) > 1 and records.min() >= 0 and bool((np.diff(records) < 0).any()):
        order = np.argsort(records, kind="stable")
        entries, records = [entries[place] for place in order.tolist()], records[order]
    groups = _GroupTable(document, own)
    tables = _Tables(groups)
    pairs = np.array([tables.pair(entry) for entry in entries], dtype=np.int32).reshape(-1, 2)
    is_p2p = np.array([tables.signatures[number].op in P2P for number in pairs[:, 1].tolist()], dtype=bool)
    groups.complete()
    wheres, places = _places(entries)
    dump = Dump(
        rank=rank, taken_ns=_int(own.get("taken_ns"), 0), wrapped=_is_wrapped(own, records, entries), groups=tuple(groups.groups),
        signatures=tuple(tables.signatures), places=places, group=pairs[:, 0].copy(), seq=_sequence(entries, pairs[:, 0], is_p2p),
        signature=pairs[:, 1].copy(), created_ns=_ints([entry.get("time_created_ns") for entry in entries], 0),
        finished=np.array([_is_finished(entry) for entry in entries], dtype=bool),
        step=_counts(entries, "step"), micro=_counts(entries, "micro"), place=wheres,
        marker=_marker(own.get("marker")),
    )  # fmt: skip
    return Columns(dump, _world_size(own, dump.groups), str(own.get("host") or ""), _notes(document, records), step_rows(own))


class _GroupTable:
    """Groups of one rank, in the order in which they are first used, then as configured."""

    def __init__(self, document: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self._known: dict[str, Group] = {}
        for name, facts in _mapping(document.get("pg_config")).items():
            self._learn(str(name), facts, ("name", "ranks", "desc"))
        for name, facts in _mapping(own.get("groups")).items():
            self._learn(str(name), facts, ("", "ranks", "description"))
        self.groups: list[Group] = []
        self._places: dict[tuple[str, str], int] = {}

    def _learn(self, name: str, facts: Any, keys: tuple[str, str, str]) -> None:
        facts = facts if isinstance(facts, dict) else {"ranks": facts}
        ranks = _ranks(facts.get(keys[1]))
        name = name or str(facts.get(keys[0]) or "") or (DEFAULT_GROUP if ranks else "")  # gloo's lone group has no name there
        if name:
            before = self._known.get(name)
            description = str(facts.get(keys[2]) or (before.description if before else ""))
            self._known[name] = Group(name, ranks or (before.ranks if before else ()), description)

    def place(self, entry: Entry) -> int:
        """Number of the entry's group."""
        named = entry.get("process_group")
        if isinstance(named, list | tuple) and named:
            name, description = str(named[0]), str(named[1]) if len(named) > 1 else ""
        else:
            name, description = str(named or entry.get("pg_name") or entry.get("pg_id") or DEFAULT_GROUP), ""
        key = (name, description)
        if key not in self._places:
            known = self._known.get(name)
            self._places[key] = len(self.groups)
            self.groups.append(Group(name, known.ranks if known else (), description or (known.description if known else "")))
        return self._places[key]

    def complete(self) -> None:
        """Add the groups that no entry used yet."""
        used = {group.name for group in self.groups}
        self.groups += [self._known[name] for name in sorted(self._known.keys() - used)]


class _Tables:
    """Entries' groups and signatures, each kept once."""

    def __init__(self, groups: _GroupTable) -> None:
        self.groups = groups
        self.signatures: list[Signature] = []
        self._numbers: dict[Signature, int] = {}
        self._pairs: dict[bytes, tuple[int, int]] = {}

    def pair(self, entry: Entry) -> tuple[int, int]:
        """Numbers of an entry's group and signature."""
        get = entry.get
        facts = (
            get("process_group"), get("profiling_name"), get("input_sizes"), get("input_dtypes"), get("output_sizes"),
            get("output_dtypes"), get("reduce_op"), get("root"), get("peer"), get("tag"), get("pg_id"), get("pg_name"),
        )  # fmt: skip
        key = _bytes_of(facts)  # equal bytes only for equal values, and much cheaper than tuples of tuples
        found = self._pairs.get(key)
        if found is None:
            group = self.groups.place(entry)
            signature = signature_of(entry, self.groups.groups[group])
            number = self._numbers.setdefault(signature, len(self._numbers))
            if number == len(self.signatures):
                self.signatures.append(signature)
            found = self._pairs[key] = group, number
        return found


def _bytes_of(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # of a pickle: what JSON does not know
        return marshal.dumps(value, 2)


def signature_of(entry: Entry, group: Group) -> Signature:
    """What the entry's operation was."""
    words = str(entry.get("profiling_name") or "").rpartition(":")[2].split()
    op = words[0] if words else ""
    peer = _int(entry.get("peer"), -1)
    peers = _PEERS.search(str(entry.get("profiling_name") or ""))
    if peer < 0 and peers and op in P2P:
        local = int(peers[3])
        peer = group.ranks[local] if local < len(group.ranks) else local
    return Signature(
        op=op, sizes=_sizes(entry.get("input_sizes")), dtypes=_words(entry.get("input_dtypes")),
        output_sizes=_sizes(entry.get("output_sizes")), output_dtypes=_words(entry.get("output_dtypes")),
        reduce_op=str(entry.get("reduce_op") or ""), root=_int(entry.get("root"), -1), peer=peer, tag=_int(entry.get("tag"), 0),
    )  # fmt: skip


def _is_finished(entry: Entry) -> bool:
    """Known to be over. Gloo's entries stay "scheduled" and only retire; NCCL's tell their state, and retire after a time-out, too."""
    state = entry.get("state")
    if state == "completed" or entry.get("time_discovered_completed_ns"):
        return True
    if state == "started":
        return False
    retired = entry.get("retired")
    return bool(retired) if retired is not None else _int(entry.get("left_ns"), 0) > 0


def _is_wrapped(own: Mapping[str, Any], records: npt.NDArray[np.int64], entries: Sequence[Entry]) -> bool:
    if isinstance(own.get("wrapped"), bool):
        return bool(own["wrapped"])
    if len(records) and records.min() >= 0:
        return bool(records[0] > 0 or (np.diff(records) > 1).any())  # also where only pending ones were dumped
    return bool(entries) and _int(entries[0].get("collective_seq_id"), 1) > 1


def _sequence(entries: Sequence[Entry], groups: npt.NDArray[np.int32], is_p2p: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Numbers within the group as recorded; counted here where a version did not record them."""
    seq = _ints([entry.get("collective_seq_id", entry.get("seq_id")) for entry in entries], 0)
    if is_p2p.any():
        p2p_seq = _ints([entry.get("p2p_seq_id") for entry in entries], 0)
        seq = np.where(is_p2p & (p2p_seq > 0), p2p_seq, np.where(is_p2p, 0, seq))
    for group, kind in set(zip(groups[seq <= 0].tolist(), is_p2p[seq <= 0].tolist(), strict=True)):
        own = (groups == group) & (is_p2p == kind)
        if not (seq[own] > 0).any():
            seq[own] = np.arange(1, int(own.sum()) + 1)
    return seq


def _counts(entries: Sequence[Entry], key: str) -> npt.NDArray[np.int32] | None:
    """What our own recorder adds to entries; None where it did not."""
    values = [entry.get(key) for entry in entries]
    return None if all(value is None for value in values) else _ints(values, -1).clip(-1, 2**31 - 1).astype(np.int32)


def _places(entries: Sequence[Entry]) -> tuple[npt.NDArray[np.int32] | None, tuple[str, ...]]:
    """Numbers of call sites and their table; None where no entry has one."""
    table: dict[str, int] = {}
    seen: dict[bytes, int] = {}
    numbers = []
    for entry in entries:
        source = entry.get("where") or entry.get("frames")
        key = _bytes_of(source) if source else b""
        if key not in seen:
            seen[key] = table.setdefault(_place(source), len(table))
        numbers.append(seen[key])
    if not any(table):
        return None, ()
    return np.array(numbers, dtype=np.int32), tuple(table)


def _place(source: Any) -> str:
    """A call site "file.py:12 function": the innermost frame that is not torch's own."""
    if isinstance(source, str):
        return source
    frames = [frame for frame in source or () if isinstance(frame, dict)] if isinstance(source, list | tuple) else []
    own = [frame for frame in frames if not _OF_TORCH.search(str(frame.get("filename", "")))] or frames
    if not own:
        return ""
    return f"{str(own[0].get('filename', '')).rpartition('/')[2]}:{own[0].get('line', 0)} {own[0].get('name', '')}".strip()


def _marker(value: Any) -> Marker | None:
    if not isinstance(value, dict):
        return None
    return Marker(
        step=_int(value.get("step"), -1), phase=str(value.get("phase") or ""), micro=_int(value.get("micro"), -1),
        since_ns=_int(value.get("since_ns"), 0), beat_ns=_int(value.get("beat_ns"), 0), note=str(value.get("note") or ""),
    )  # fmt: skip


def _world_size(own: Mapping[str, Any], groups: Sequence[Group]) -> int:
    """As recorded, or the size of the group of all ranks: torch calls it "default_pg"."""
    whole = [len(group.ranks) for group in groups if group.description == "default_pg" or group.name == DEFAULT_GROUP]
    return _int(own.get("world_size"), 0) or max(whole, default=0)


def _notes(document: Mapping[str, Any], records: npt.NDArray[np.int64]) -> tuple[str, ...]:
    version = str(document.get("version") or "")
    major = _NUMBER.match(version)
    newer = [f"has version {version}, newer than the {KNOWN_VERSION}.x known here: read as far as its keys are the same"]
    gaps = ["holds pending operations only, so what was finished is not known"]
    return (*(newer if major and int(major[0]) > KNOWN_VERSION else ()), *(gaps if len(records) and (np.diff(records) > 1).any() else ()))


def _ints(values: Sequence[Any], missing: int) -> npt.NDArray[np.int64]:
    """Whole numbers; what is none becomes `missing`, what is too large the largest."""
    try:
        return np.array(values, dtype=np.int64).reshape(len(values))
    except (TypeError, ValueError, OverflowError):
        return np.array([_int(value, missing) for value in values], dtype=np.int64)


def _int(value: Any, missing: int) -> int:
    try:
        return missing if value is None else max(min(int(value), INT64_MAX), -INT64_MAX)
    except (TypeError, ValueError, OverflowError):
        return missing


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple):
        return ()
    if value and not any(isinstance(item, list | tuple) for item in value):
        value = [value]  # one flat shape
    return tuple(tuple(_int(size, -1) for size in shape) for shape in value if isinstance(shape, list | tuple))


def _words(value: Any) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list | tuple) else ()


def _ranks(value: Any) -> tuple[int, ...]:
    """Members, also in NCCL's text form "[0, 1]"."""
    texts = _NUMBER.findall(value) if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
    found = [_int(text, -1) for text in texts]
    return tuple(sorted({rank for rank in found if 0 <= rank < 2**31}))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
