"""Builders of evidence: a rank's operations as a line of text.

    "ar8 ar8#1@12 bar*"    all_reduce of 8, another in step 1 at line 12, and a barrier that it is inside
    "ar8 | ar8 ~ ar8"      after "|" only the dump after the end knows; "~" is a silence of six seconds

Operation: ar all_reduce, ag all_gather, rs reduce_scatter, aa all_to_all, bc broadcast, re reduce, ga gather, sc scatter, bar barrier,
send, recv; then elements, a type (i int32, b bfloat16, l int64, y bytes), ":1" group, "/2" root or peer, "!max" reduce operator,
"#1" step, "%1" micro-batch, "@12" line, "*" pending. Every rank begins with all_reduces of 4, 5 and 6 and a barrier, so number 5 of
group "0" is its first own one.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from validation.flight import Dump, Evidence, Group, Marker, RankEvidence, Signature, StackFrame, ThreadStack

NAMES = {
    "ar": "all_reduce", "ag": "all_gather", "rs": "reduce_scatter", "aa": "all_to_all", "bc": "broadcast", "re": "reduce",
    "ga": "gather", "sc": "scatter", "bar": "barrier", "send": "send", "recv": "recv",
}  # fmt: skip
TYPES = {"": "Float", "i": "Int", "b": "BFloat16", "l": "Long", "y": "Byte"}
START_NS, STEP_NS, SILENCE_NS = 1_800_000_000_000_000_000, 1_000_000, 6_000_000_000
_OPERATION = re.compile(
    r"(?P<op>bar|send|recv|ar|ag|rs|aa|bc|re|ga|sc)(?P<shape>[\dx]*)(?P<type>[ibly]?)(?::(?P<group>\w+))?(?:/(?P<root>\d+))?(?:!(?P<by>\w+))?"
    r"(?:\#(?P<step>\d+))?(?:%(?P<micro>\d+))?(?:@(?P<line>\d+))?(?P<pending>\*?)$"
)
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:20399"
TIMED_OUT = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete"


def dump(rank: int, text: str, *, groups: Mapping[str, Iterable[int]] | None = None, marker: Marker | None = None, taken_s: float = 0.0,
         prelude: bool = True, wrapped: bool = False) -> Dump:  # fmt: skip
    """One snapshot. Args: groups, member lists by name; nothing recorded without."""
    tables: tuple[dict[str, int], dict[Signature, int], dict[str, int]] = ({}, {}, {})
    rows, seqs, now = [], {}, START_NS + rank * 1000
    for word in ("ar4 ar5 ar6 bar " if prelude else "").split() + text.split():
        now += STEP_NS
        if word == "~":
            now += SILENCE_NS
            continue
        match = _OPERATION.match(word)
        assert match, word
        part = match.groupdict()
        name, is_p2p = part["group"] or "0", part["op"] in ("send", "recv")
        seqs[name, is_p2p] = seqs.get((name, is_p2p), 0) + 1
        place = f"train.py:{part['line']} step" if part["line"] else ""
        numbers = [table.setdefault(key, len(table)) for table, key in zip(tables, (name, _signature(part), place), strict=True)]
        finished, step, micro = not part["pending"], int(part["step"] or -1), int(part["micro"] or -1)
        rows.append((*numbers, seqs[name, is_p2p], now, finished, step, micro))
    known = groups or {}
    columns = np.array(rows, dtype=np.int64).reshape(-1, 8)
    return Dump(
        rank=rank, taken_ns=START_NS + int(taken_s * 1e9) if taken_s else 0, wrapped=wrapped, marker=marker,
        groups=(*(Group(name, tuple(known.get(name, ()))) for name in tables[0]),
                *(Group(name, tuple(ranks)) for name, ranks in known.items() if name not in tables[0])),
        signatures=tuple(tables[1]), places=tuple(tables[2]), group=columns[:, 0].astype(np.int32),
        signature=columns[:, 1].astype(np.int32),
        place=columns[:, 2].astype(np.int32) if any(tables[2]) else None, seq=columns[:, 3], created_ns=columns[:, 4],
        finished=columns[:, 5].astype(bool), step=columns[:, 6].astype(np.int32) if (columns[:, 6] >= 0).any() else None,
        micro=columns[:, 7].astype(np.int32) if (columns[:, 7] >= 0).any() else None,
    )  # fmt: skip


def _signature(part: Mapping[str, str]) -> Signature:
    shape = tuple(int(width) for width in part["shape"].split("x")) if part["shape"] else ()
    sizes, types = ((shape,), (TYPES[part["type"]],)) if part["op"] != "bar" else ((), ())
    root = int(part["root"]) if part["root"] else -1
    is_p2p = part["op"] in ("send", "recv")
    return Signature(
        NAMES[part["op"]], sizes, types, sizes, types, part["by"] or "", -1 if is_p2p else root, root if is_p2p else -1,
    )  # fmt: skip


def stack(*frames: str) -> tuple[ThreadStack, ...]:
    """A main thread, innermost first: "train.py:12 step", and "all_reduce" for torch's own function of that name."""
    made = []
    for frame in frames:
        path, _, rest = frame.partition(":")
        line, _, function = rest.partition(" ")
        torchs = StackFrame("lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3000, frame)
        made.append(StackFrame(path, int(line), function) if rest else torchs)
    return (ThreadStack("", True, tuple(made)),)


def one(rank: int, text: str, **known: object) -> RankEvidence:
    """A rank's evidence from its line; `known` are fields of RankEvidence, or of `dump`."""
    own = {name: known.pop(name) for name in ("groups", "marker", "taken_s", "prelude", "wrapped") if name in known}
    seen, _, later = text.partition("|")
    dumps = (dump(rank, seen, **own),)  # type: ignore[arg-type]
    late = (dump(rank, f"{seen} {later}".replace("*", ""), **own),) if later.strip() or "|" in text else ()  # type: ignore[arg-type]
    return RankEvidence(rank=rank, dumps=dumps, late_dumps=late, **known)  # type: ignore[arg-type]


def job(*lines: str | RankEvidence, **shared: object) -> Evidence:
    """A job's evidence, a line a rank; `shared` goes to every line."""
    ranks = {
        rank: replace(line, rank=rank) if isinstance(line, RankEvidence) else one(rank, line, **shared) for rank, line in enumerate(lines)
    }
    return Evidence(world_size=len(lines), ranks=ranks)


def without(evidence: Evidence, rank: int) -> Evidence:
    """The same, when a rank left nothing."""
    return replace(evidence, ranks={other: known for other, known in evidence.ranks.items() if other != rank})


def relabelled(evidence: Evidence, names: Mapping[int, int]) -> Evidence:
    """The same job with other numbers of ranks; for operations without root and peer, of groups without member lists."""
    ranks = {}
    for rank, known in evidence.ranks.items():
        dumps, late = (tuple(replace(each, rank=names[rank]) for each in found) for found in (known.dumps, known.late_dumps))
        ranks[names[rank]] = replace(known, rank=names[rank], dumps=dumps, late_dumps=late)
    return replace(evidence, ranks=ranks)
