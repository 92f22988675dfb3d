"""Bytes of a dump: what is whole is read, what could run code is refused, and nothing is executed."""

import contextlib
import json
import os
import pickle
import random
from pathlib import Path

import pytest
from helpers_dumps import document, entries

from infra.dump_pool import read_files
from infra.dump_raw import UnreadableDump, parse

WHOLE = document(entries(5))


class Runs:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_of_plain_values_is_read(protocol: int) -> None:
    """Every protocol, torch's own is 2."""
    assert parse(pickle.dumps(WHOLE, protocol)).document == WHOLE


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_code_is_refused(protocol: int, tmp_path: Path) -> None:
    """It is named, and nothing was run."""
    body = pickle.dumps(WHOLE | {"entries": [Runs(tmp_path / "ran")]}, protocol)

    with pytest.raises(UnreadableDump, match=r"asks for '(posix|os)\.system'.*refused"):
        parse(body)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "body",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02cbuiltins\neval\n.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02X\x01\x00\x00\x00aQ.",
        b"\x80\x02ccollections\nOrderedDict\n)R.",
    ],
    ids=["protocol 0", "global", "stack global", "extension", "persistent id", "harmless class"],
)
def test_every_way_to_a_name_is_closed(body: bytes) -> None:
    """Also to harmless ones: a dump needs none."""
    with pytest.raises(UnreadableDump):
        parse(body)


def test_a_pickle_that_asks_for_much_memory_costs_a_message(tmp_path: Path) -> None:
    """Its memo alone would take 64 GB."""
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(b"\x80\x02}r\xff\xff\xff\xff.")

    (parsed,) = read_files([(path, 0)])

    assert parsed.dump is None
    assert "memory" in parsed.notes[0]


@pytest.mark.parametrize("cut", [0.4, 0.7, 0.9])
def test_what_stands_before_a_cut_is_read(cut: float) -> None:
    """JSON and pickle alike; newer operations are known to be lost."""
    text, body = json.dumps(WHOLE).encode(), pickle.dumps({"version": "2.10", "entries": entries(50)}, 2)

    for raw in (parse(text[: int(len(text) * cut)]), parse(body[: int(len(body) * cut)])):
        assert raw.is_cut
        assert 0 < len(raw.document["entries"]) < 50
        assert raw.document["entries"][0] == entries(5)[0]


def test_a_file_that_ends_after_its_operations_lacks_none_of_them() -> None:
    """The groups are lost, the order of operations is not."""
    text = json.dumps({"entries": entries(5), "pg_config": {}})

    raw = parse(text[:-3].encode())

    assert (len(raw.document["entries"]), raw.is_cut) == (5, False)


RUBBISH = (
    b"", b"   ", b"\x00" * 99, b"hello", b"{}", b"[]", b"{", b"3", b'{"entries": 5}', b"[" * 200_000, b"\x80\x02.", b"\x80\x02K\x05.",
)  # fmt: skip


@pytest.mark.parametrize("body", RUBBISH, ids=lambda body: repr(body[:16]))
def test_rubbish_is_no_dump(body: bytes) -> None:
    """Whatever it is, it is one kind of error."""
    with pytest.raises(UnreadableDump):
        parse(body)


def test_random_bytes_are_no_dump() -> None:
    """Neither those nor a dump with bytes turned over make anything but a dump or that error."""
    luck, whole = random.Random(0), pickle.dumps(WHOLE, 2)
    for _ in range(300):
        spoiled = bytearray(whole)
        for _ in range(3):
            spoiled[luck.randrange(len(spoiled))] = luck.randrange(256)
        for body in (bytes(spoiled), luck.randbytes(64)):
            with contextlib.suppress(UnreadableDump):
                assert isinstance(parse(body).document["entries"], list)


def test_entries_that_are_no_records_are_left_out() -> None:
    """The others are used, and it is said."""
    raw = parse(json.dumps({"entries": [1, *entries(2), None]}).encode())

    assert len(raw.document["entries"]) == 2
    assert "2 of its 4 entries" in raw.note


def test_operations_without_a_name_are_left_out_and_nothing_is_made_of_it() -> None:
    """What a rank did there is not known: it counts as a file that was cut off."""
    nameless = [{key: value for key, value in entry.items() if key != "profiling_name"} for entry in entries(2)]

    raw = parse(json.dumps(document([*entries(5), *nameless])).encode())

    assert (len(raw.document["entries"]), raw.is_cut) == (5, True)
    assert "2 of its 7 entries do not say which operation they are" in raw.note
