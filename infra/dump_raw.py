"""Bytes of a flight-recorder file -> the plain document in them. Nothing that a file says is ever executed.

torch writes JSON (`_dump_fr_trace_json`) or a pickle (`_dump_fr_trace`, `_dump_nccl_trace`, and what NCCL's watchdog leaves). A pickle is
read by an unpickler that knows containers, strings and numbers alone: whatever names a class or function is refused.
"""

import io
import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson

ENTRY_KEYS = ("process_group", "pg_id", "collective_seq_id", "profiling_name")  # what tells an entry from another dict
_DECODER = json.JSONDecoder()
_ENTRIES = re.compile(r'"entries"\s*:\s*\[')


class UnreadableDump(Exception):
    """A file is no flight-recorder dump, or would have run code; the text says why, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Raw:
    """What stood in a file."""

    document: dict[str, Any]  # "entries" is a list of dicts
    is_cut: bool = False  # the newest entries are lost
    note: str = ""  # what was wrong with it, as the end of a sentence


def parse(data: bytes) -> Raw:
    """Read a JSON document or a pickle, whole or cut short.

    Raises: UnreadableDump, with the reason.
    """
    if not data.strip():
        raise UnreadableDump("is empty")
    raw = _parse_json(data) if data.lstrip(b" \t\r\n\xef\xbb\xbf")[:1] in (b"{", b"[") else _parse_pickle(data)
    entries = raw.document.get("entries")
    if not isinstance(entries, list):
        raise UnreadableDump("holds no list of recorded operations ('entries')")
    kept = [entry for entry in entries if isinstance(entry, dict) and entry.get("profiling_name")]
    if len(kept) < len(entries):
        # what they were is not known: as after a cut, nothing may be made of a rank that seems to be behind or to do something else
        note = f"{len(entries) - len(kept)} of its {len(entries)} entries do not say which operation they are, and were left out"
        return Raw(raw.document | {"entries": kept}, True, raw.note or note)
    return raw


def _parse_json(data: bytes) -> Raw:
    try:
        return Raw(_as_document(orjson.loads(data)))
    except ValueError:
        text = data.decode("utf-8-sig", errors="replace")
    try:
        return Raw(_as_document(json.loads(text)))  # NaN, a byte-order mark or a letter that is not UTF-8
    except (ValueError, RecursionError) as error:
        reason = f"{error}"
    start = _ENTRIES.search(text)
    entries, is_closed = _whole_entries(text, start.end()) if start else ([], False)
    if start is None or not (entries or is_closed):
        raise UnreadableDump(f"is no whole JSON ({reason})")
    if is_closed:
        return Raw({"entries": entries}, note="ends early: all its operations are there, what follows them (groups, version) is lost")
    return Raw(
        {"entries": entries}, is_cut=True, note=f"is cut off: {len(entries)} operations before the cut were read, newer ones are lost"
    )


def _as_document(value: Any) -> dict[str, Any]:
    """A document, or a bare list of entries as one."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and any(key in value[0] for key in ENTRY_KEYS):
        return {"entries": value}
    if not isinstance(value, dict):
        raise UnreadableDump("holds no list of recorded operations ('entries')")
    return value


def _whole_entries(text: str, at: int) -> tuple[list[Any], bool]:
    """Entries up to the first that is not whole, and whether the list was closed."""
    entries: list[Any] = []
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if text[at : at + 1] == "]":
            return entries, True
        try:
            entry, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return entries, False
        entries.append(entry)


def _refuse(what: str) -> NoReturn:
    raise UnreadableDump(f"is a pickle that asks for {what}, which a dump never needs and which could run code: refused, nothing was run")


class _PlainUnpickler(pickle.Unpickler):
    """Builds dicts, lists, tuples, sets, strings and numbers; refuses every name."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        _refuse(f"'{module_name}.{global_name}'")

    def persistent_load(self, _pid: Any, /) -> NoReturn:
        _refuse("an object from outside the file")


class _SlowUnpickler(pickle._Unpickler):
    """The same in Python: what it had built before a cut can be looked at."""

    memo: dict[int, Any]
    stack: list[Any]
    metastack: list[list[Any]]

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        _refuse(f"'{module_name}.{global_name}'")

    def persistent_load(self, _pid: Any) -> NoReturn:
        _refuse("an object from outside the file")


def _parse_pickle(data: bytes) -> Raw:
    try:
        return Raw(_as_document(_PlainUnpickler(io.BytesIO(data)).load()))
    except UnreadableDump:
        raise
    except MemoryError:
        raise UnreadableDump("is a pickle that asks for more memory than a dump can need: refused") from None
    except Exception as error:  # the C code raises whatever its input leads it to
        reason = f"{type(error).__name__}: {error}"
    if data[:1] != b"\x80":
        raise UnreadableDump("is neither JSON nor a pickle")
    entries = list(_entries_before_cut(data))
    if not entries:
        raise UnreadableDump(f"is no whole pickle ({reason})")
    return Raw(
        {"entries": entries}, is_cut=True, note=f"is cut off: {len(entries)} operations before the cut were read, newer ones are lost"
    )


def _entries_before_cut(data: bytes) -> Iterator[dict[str, Any]]:
    """The entries that a pickle had built when it broke off, oldest first."""
    unpickler = _SlowUnpickler(io.BytesIO(data))
    try:
        unpickler.load()
    except UnreadableDump:
        raise
    except Exception:  # wherever it breaks off
        built = [*unpickler.memo.values(), *(item for stack in unpickler.metastack for item in stack), *unpickler.stack]
    else:
        built = []
    seen: set[int] = set()
    for item in [part for whole in built for part in (whole if isinstance(whole, list) else [whole])]:
        if isinstance(item, dict) and "time_created_ns" in item and any(key in item for key in ENTRY_KEYS) and id(item) not in seen:
            seen.add(id(item))
            yield item
