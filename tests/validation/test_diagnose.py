"""The finding does not depend on order or numbering, never blames who waits, and is made of a large job within seconds."""

import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pytest
from helpers_hang import dump, job, one, relabelled, without
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from validation.canonical import canonical_json
from validation.diagnose import diagnose
from validation.finding import Finding, FindingKind, Operation, document
from validation.flight import Dump, Evidence, Group, RankEvidence, Signature
from validation.hang_meanings import MEANINGS

OPERATIONS = ("ar8", "ar9", "ag8", "bar", "bc8")
FAULTS = ("leaves out", "other size", "other operation", "ends", "killed")


def faulty(size: int, culprit: int, before: list[str], fault: str) -> Evidence:
    """A job whose ranks all do `before`, then wait in an all_reduce of 12; the culprit does something else."""
    past, waiting = " ".join(before), f"{' '.join(before)} ar12*"
    others = {
        "leaves out": one(0, f"{past} bar*"), "other size": one(0, f"{past} ar13*"), "other operation": one(0, f"{past} rs12*"),
        "ends": one(0, past, result="ok", exit_code=0), "killed": one(0, past, exit_code=-9),
    }  # fmt: skip
    return job(*(others[fault] if rank == culprit else one(rank, waiting) for rank in range(size)))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Evidence, int]:
    """A job of three to six ranks with one fault."""
    size = draw(st.integers(3, 6))
    culprit = draw(st.integers(0, size - 1))
    before = draw(st.lists(st.sampled_from(OPERATIONS), max_size=6))
    return faulty(size, culprit, before, draw(st.sampled_from(FAULTS))), culprit


QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(jobs())
def test_the_culprit_is_named(made: tuple[Evidence, int]) -> None:
    """Whoever it is, whatever came before."""
    evidence, culprit = made

    assert diagnose(evidence).ranks == (culprit,)


@QUICK
@given(jobs(), st.randoms())
def test_order_of_files_does_not_matter(made: tuple[Evidence, int], random: object) -> None:
    """Nor that of the ranks' own tables of groups and signatures."""
    evidence, _ = made
    order = list(evidence.ranks)
    random.shuffle(order)  # type: ignore[attr-defined]
    mixed = replace(evidence, ranks={rank: _tables_reversed(evidence.ranks[rank]) for rank in order})

    assert diagnose(mixed) == diagnose(evidence)


def _tables_reversed(known: RankEvidence) -> RankEvidence:
    def turned(each: Dump) -> Dump:
        last = len(each.signatures) - 1
        return replace(each, signatures=each.signatures[::-1], signature=(last - each.signature).astype(np.int32))

    return replace(known, dumps=tuple(turned(each) for each in known.dumps))


@QUICK
@given(jobs(), st.data())
def test_numbers_of_ranks_do_not_matter(made: tuple[Evidence, int], data: st.DataObject) -> None:
    """Renumbered ranks give the renumbered finding."""
    evidence, culprit = made
    names = dict(zip(evidence.ranks, data.draw(st.permutations(list(evidence.ranks))), strict=True))
    before, after = diagnose(evidence), diagnose(relabelled(evidence, names))

    assert (after.kind, after.verdict, after.first_visible.seq) == (before.kind, before.verdict, before.first_visible.seq)
    assert after.ranks == (names[culprit],)


@QUICK
@given(jobs(), st.data())
def test_a_missing_dump_blames_nobody_who_waits(made: tuple[Evidence, int], data: st.DataObject) -> None:
    """With one rank's files gone the culprit is still named, or nobody."""
    evidence, culprit = made
    gone = data.draw(st.sampled_from(list(evidence.ranks)))

    assert set(diagnose(without(evidence, gone)).ranks) <= {culprit}


@QUICK
@given(jobs(), st.integers(2, 5))
def test_a_wrapped_ring_blames_nobody_who_waits(made: tuple[Evidence, int], kept: int) -> None:
    """Operations that the ring lost are not missing."""
    evidence, culprit = made

    def newest(each: Dump) -> Dump:
        names = ("group", "seq", "signature", "created_ns", "finished")
        return replace(each, wrapped=True, **{name: getattr(each, name)[-kept:] for name in names})

    cut = {rank: replace(known, dumps=tuple(map(newest, known.dumps))) for rank, known in evidence.ranks.items()}

    assert diagnose(replace(evidence, ranks=cut)).ranks == (culprit,)


def test_clocks_hours_apart_change_nothing_in_a_hang() -> None:
    """Who is missing follows from numbers, not from times."""
    evidence = job("ar8 ar8*", "ar8 ar8*", "ar8 bar*")
    far = replace(
        evidence.ranks[1], dumps=tuple(replace(each, created_ns=each.created_ns + 7200 * 10**9) for each in evidence.ranks[1].dumps)
    )

    assert diagnose(replace(evidence, ranks={**evidence.ranks, 1: far})) == diagnose(evidence)


@pytest.mark.parametrize("evidence", [Evidence(world_size=0, ranks={}), Evidence(world_size=2, ranks={0: RankEvidence(rank=0)})])
def test_nothing_known_is_no_health(evidence: Evidence) -> None:
    """Without a record there is no verdict."""
    finding = diagnose(evidence)

    assert (finding.verdict, finding.kind) == ("inconclusive", "insufficient_evidence")


def test_an_empty_ring_is_read() -> None:
    """A rank that issued nothing yet is missing where others wait."""
    evidence = Evidence(world_size=3, ranks={rank: RankEvidence(rank=rank, dumps=(dump(rank, line, prelude=False),))
                                             for rank, line in enumerate(("ar8*", "ar8*", ""))})  # fmt: skip

    assert diagnose(evidence).ranks == (2,)


def test_a_timeline_is_looked_at_when_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang is judged without it; a job that is well is handed over."""
    from validation import straggling

    slow = Finding(verdict="straggler", kind="late_rank", ranks=(1,), explanation="slow.", action="look")
    monkeypatch.setattr(straggling, "find_stragglers", lambda _: (slow,))
    hung, well = (replace(job(*lines), timeline=pd.DataFrame()) for lines in (("ar8*", "ar8*", "bar*"), ("ar8", "ar8")))

    assert diagnose(hung).kind == "missing_participant"
    assert diagnose(well) is slow


def big(ranks: int, rows: int, culprit: int, *, in_eights: bool) -> Evidence:
    """Full rings of many ranks, in one group or also in groups of eight; the culprit's last operation has another size."""
    table = (
        Signature("all_reduce", ((1024,),), ("Float",)),
        Signature("all_gather", ((64,),), ("Float",)),
        Signature("all_reduce", ((7,),), ("Float",)),
    )
    base = np.arange(rows)
    made = {}
    for rank in range(ranks):
        groups = [Group("0", tuple(range(ranks)))]
        group, seq, signature = np.zeros(rows, np.int32), base + 100_001, (base % 2).astype(np.int32)
        if in_eights:
            low = rank // 8 * 8
            groups.append(Group(str(1 + low // 8), tuple(range(low, low + 8))))
            group = (base % 4 != 0).astype(np.int32)
            seq = np.where(group == 0, np.cumsum(group == 0), np.cumsum(group == 1))
        if rank == culprit:
            signature[-1] = 2
        each = Dump(rank=rank, wrapped=True, groups=tuple(groups), signatures=table, group=group, seq=seq.astype(np.int64),
                    signature=signature,
                    created_ns=base * 1000, finished=base < rows - 1, step=(base // 10).astype(np.int32))  # fmt: skip
        made[rank] = RankEvidence(rank=rank, dumps=(each,))
    return Evidence(world_size=ranks, ranks=made)


@pytest.mark.parametrize("in_eights", [False, True], ids=["one group", "groups of eight"])
def test_a_large_job_is_judged_fast(in_eights: bool) -> None:
    """256 ranks with 2,000 operations each: at least 200,000 operations a second of processor time."""
    evidence = big(256, 2000, 77, in_eights=in_eights)
    began = time.process_time()
    finding = diagnose(evidence)
    seconds = time.process_time() - began

    assert (finding.ranks, finding.first_visible.group) == ((77,), "10" if in_eights else "0")
    assert 256 * 2000 / seconds > 200_000


def test_every_kind_is_documented() -> None:
    """The closed list, its meanings and the page name the same kinds in the same words."""
    page = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text()

    assert set(get_args(FindingKind)) == set(MEANINGS)
    for kind, meaning in MEANINGS.items():
        assert f"| {kind} | {meaning.signature} | {meaning.needs} | {meaning.action} |" in page


def test_document_is_plain() -> None:
    """Unknown numbers are null, several groups a list, and all of it is JSON."""
    made = document(diagnose(job("ar8:1*", "ar8:1*", "ar8:1*", "ar8:2*")))
    empty = document(Finding(verdict="healthy", kind="healthy", explanation="Well.", action="nothing", collective=Operation()))

    assert made["group"] == ["1", "2"]
    assert made["collective"]["seq"] == 1
    assert made["ranks"] == [3]
    assert (empty["group"], empty["collective"]["seq"]) == (None, None)
    assert canonical_json(made)
