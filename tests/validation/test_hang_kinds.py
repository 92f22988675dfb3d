"""Each kind of hang and crash is told from what ranks leave of it, by our own records and by torch's alone."""

import pytest
from helpers_hang import LOST, START_NS, TIMED_OUT, job, one, stack

from validation.diagnose import diagnose
from validation.finding import Finding
from validation.flight import Evidence, Marker

AB = {"1": (0, 1, 2, 3), "2": (0, 1, 2, 3)}
CHAIN = {str(first + 1): (first, first + 1) for first in range(4)}
SENDS, RECEIVES = stack("send", "train.py:9 step"), stack("recv", "train.py:9 step")
BUSY = stack("train.py:30 load", "train.py:9 step")
BEAT = Marker(step=2, phase="forward", beat_ns=START_NS + 9_900_000_000)


def marker(**known: object) -> Marker:
    """Alive when the dump of second 10 was taken."""
    return BEAT._replace(**known)  # type: ignore[arg-type]


CASES: dict[str, tuple[Evidence, str, tuple[int, ...], int]] = {  # evidence, kind, culprits, first visible number (0 = any)
    "left the loop, stands in the barrier": (
        job("ar8 ar8 ar8*", "ar8 ar8 ar8*", "ar8 ar8 bar*", "ar8 ar8 ar8*"), "missing_participant", (2,), 7),
    "a bucket left out, foretold by the steps before": (
        job(*["ar10 ar20 ar10 ar20 ar10*"] * 3, "ar10 ar20 ar10 ar20 ar20*"), "missing_participant", (3,), 9),
    "micro-batch skipped, equal sizes": (
        job(*["ar8#0%0 ar8#0%1 ar8#0%2 ar8#0%3 ar8#1%0 ar8#1%1*"] * 3, "ar8#0%0 ar8#0%1 ar8#0%3 ar8#1%0 ar8#1%1 bar#1%1*"),
        "missing_participant", (3,), 10),
    "three reduce, one gathers": (job("ar16*", "ar16*", "ag16*", "ar16*"), "op_type_mismatch", (2,), 5),
    "two ranks, two operations": (job("bc1*", "ar25*"), "op_type_mismatch", (0, 1), 5),
    "sizes differ, an innocent rank aborted": (
        job(one(0, "ar16*", exit_code=-6), one(1, "| ar24", result=LOST), one(2, "ar16*", result=LOST), one(3, "| ar16", result=LOST)),
        "shape_mismatch", (1,), 5),
    "all sizes differ": (job("ag3*", "ag4*", "ag5*", "ag6*"), "shape_mismatch", (), 5),
    "what the aborted rank issued is all that is unknown": (
        job(one(0, "| ar16", result=LOST), one(1, "", exit_code=-6), one(2, "| ar16", result=LOST)), "shape_mismatch", (1,), 5),
    "another type": (job("ar16*", "ar16b*", "ar16*"), "dtype_mismatch", (1,), 5),
    "another root": (job("bc8/0*", "bc8/0*", "bc8/2*"), "root_mismatch", (2,), 5),
    "two pending in the other order": (job(*["ar8* ag8*"] * 3, "ag8* ar8*"), "order_swap_same_group", (3,), 5),
    "silently in the other order": (job(*["ar8 ar8i bar"] * 3, "ar8i ar8 bar"), "order_swap_same_group", (3,), 5),
    "silently another operator": (job("ar8!sum bar", "ar8!max bar", "ar8!sum bar"), "silent_mismatch", (1,), 5),
    "a barrier more, the others are through": (
        job("bar@7 bar@9*", *[one(0, "bar@9", result="ok", exit_code=0)] * 3), "extra_collective", (0,), 6),
    "an operation more in the middle": (
        job(*["ar8#0@5 ar8#1@5 bar#1@9*"] * 3, "ar8#0@5 ar8#0@6 ar8#1@5*"), "extra_collective", (3,), 7),
    "out of data": (job(*["ar8 ar8 ar8*"] * 3, one(3, "ar8 ar8", marker=marker(note="data exhausted"))), "uneven_inputs", (3,), 7),
    "one turn less, through with it": (
        job(*[one(0, "ar8 ar8 ar8*", result=TIMED_OUT)] * 3, one(3, "ar8 ar8", result="ok", exit_code=0)), "uneven_inputs", (3,), 7),
    "more micro-batches": (job("ar8#0%0@5 ar8#0%1@5*", *["ar8#0%0@5 ar3#0%0@7*"] * 3), "uneven_inputs", (0,), 6),
    "left a loop for another place": (job(*["ag32@5 ag32@5 ag32@5*"] * 3, "ag32@5 ag32@5 ag48@7*"), "uneven_inputs", (3,), 7),
    "gave up a step": (job(*["ar9#0 ar8#0 ar7#0 ar9#1 ar8#1*"] * 3, "ar9#0 ar8#0 ar7#0 ar9#1 ar9#2*"), "exception_path", (3,), 9),
    "raised, cleans up": (
        job(*["ar8 ar8*"] * 3, one(3, "ar8", result="ValueError: loss is nan", stacks=(stack("train.py:3 cleanup", "train.py:9 step"),))),
        "exception_path", (3,), 6),
    "waits for all in its cleanup": (
        job(*["ar8 ar8*"] * 3, one(3, "ar8 bar*", stacks=(stack("barrier", "train.py:3 shutdown"),))), "teardown_deadlock", (3,), 6),
    "a last gather after its exception": (
        job(*["ar8#0 ar8#1*"] * 3, one(3, "ar8#0 ag4#1*", marker=marker(note="exception: KeyError: 'id'"))), "teardown_deadlock", (3,), 6),
    "killed": (
        job(one(0, "ar8*", result=LOST), one(1, "| ar8", result=LOST), one(2, "", exit_code=-9), one(3, "| ar8", result=LOST)),
        "dead_process", (2,), 5),
    "stopped, and killed after the time-out": (
        job(*[one(0, "ar8*", result=TIMED_OUT, stacks=(stack("all_reduce", "train.py:9 step"),))] * 3, one(3, "", exit_code=-9)),
        "frozen_process", (3,), 5),
    "stopped": (job("ar8*", "ar8*", one(2, "", state="T")), "frozen_process", (2,), 5),
    "its heart stands still": (
        job(*[one(0, "ar8*", marker=marker(), taken_s=10.0)] * 2, one(2, "", marker=marker(beat_ns=START_NS), taken_s=10.0, state="R")),
        "frozen_process", (2,), 5),
    "in its loader": (
        job("ar8*", "ar8*", one(2, "", stacks=(stack("lib/python3.11/queue.py:171 get", "train.py:9 step"),))),
        "dataloader_deadlock", (2,), 5),
    "came six seconds later": (job(*["ar8 ar8* | ~ ar8"] * 3, "ar8 | ~ ar8 ar8"), "late_rank", (3,), 6),
    "all in one operation": (job("ar8*", "ar8*", "ar8*"), "all_ranks_same_op", (), 5),
    "a circle over two groups": (job(*[one(0, "ar8:1*", groups=AB)] * 3, one(3, "ar8:2*", groups=AB)), "order_swap_cross_group", (3,), 1),
    "the same, members not recorded": (job("ar8:1*", "ar8:1*", "ar8:1*", "ar8:2*"), "order_swap_cross_group", (3,), 1),
    "the world before the half": (job("ar8:1*", "ar8*", "ar8:2 ar8*", "ar8:2 ar8*"), "order_swap_cross_group", (1,), 1),
    "one name, two groups": (
        job(*[one(0, "bar:1", groups={"1": (0, 3)}), one(1, "bar:1*", groups={"1": (1, 2)})] * 2), "group_membership_mismatch", (), 1),
    "the same, members not recorded but some through": (
        job(one(0, "bar:1", result="ok"), one(1, "bar:1*", result=LOST), one(2, "bar:1*", result=LOST), one(3, "bar:1", result="ok")),
        "group_membership_mismatch", (), 1),
    "both send": (job("send4/1*", "send4/0*"), "p2p_cycle", (0, 1), 0),
    "a ring that receives": (job("recv4/2*", "recv4/0*", "recv4/1*", "bar*"), "p2p_cycle", (0, 1, 2), 0),
    "both send, by stacks": (job(one(0, "", stacks=(SENDS,)), one(1, "", stacks=(SENDS,)), "bar*", "bar*"), "p2p_cycle", (0, 1), 0),
    "leaves its step with exit code 0": (
        job(*[one(0, "ar8*", result=LOST)] * 2, one(2, "", exit_code=0, marker=marker(phase="backward"))), "dead_process", (2,), 5),
    "aborted where sizes may differ": (
        job(one(0, "", exit_code=-6), *[one(1, "aa4*", result=LOST)] * 3), "insufficient_evidence", (), 0),
    "leaves out a receive that it has in every step": (
        job("bar*", one(1, "send4/2#0 send4/2#1 send4/2#2*", marker=marker()),
            one(2, "recv4/1#0 recv4/1#2 bar#2*", marker=marker()), "bar*"),
        "p2p_mismatch", (2,), 0),
    "sends once more than in the step before": (
        job("bar*", one(1, "send4/2#0 send4/2#1 send4/2#1 send4/2#2*", marker=marker()),
            one(2, "recv4/1#0 recv4/1#1 recv4/1#2 bar#2*", marker=marker()), "bar*"), "p2p_mismatch", (1,), 0),
    "a send whose receive may be still to come": (
        job("bar*", one(1, "send4/2#0 send4/2#1 send4/2#2*", marker=marker()),
            one(2, "recv4/1#0 recv4/1#1 bar#2*", marker=marker()), "bar*"),
        "p2p_mismatch", (1, 2), 0),
    "a stage sends once less, and the next but one waits as well": (
        job("bar#0 send4/1#1 send4/1#1 bar#1*", one(1, "recv4/0#0 recv4/0#0 send4/2#0 send4/2#0 bar#0 recv4/0#1 recv4/0#1 send4/2#1 bar#1*",
            marker=marker(step=1)),
            one(2, "recv4/1#0 recv4/1#0 send4/3#0 send4/3#0 bar#0 recv4/1#1 send4/3#1 recv4/1#1*", marker=marker(step=1)),
            one(3, "recv4/2#0 recv4/2#0 bar#0 recv4/2#1 recv4/2#1*", marker=marker(step=1))),
        "p2p_mismatch", (1,), 0),
    "sends to the next but one, once": (
        job(one(0, "send4/1#0 send4/2#1*"), one(1, "recv4/0#0 send4/2#0 recv4/0#1*"), one(2, "recv4/1#0 recv4/1#1*"), "bar#1*"),
        "p2p_mismatch", (0,), 0),
    "stopped inside of what all are in": (job("ar8*", "ar8*", one(2, "ar8*", state="T")), "frozen_process", (2,), 5),
    "its heart stands still inside of what all are in": (
        job(*[one(0, "ar8*", marker=marker(), taken_s=10.0)] * 2, one(2, "ar8*", marker=marker(beat_ns=START_NS), taken_s=10.0)),
        "frozen_process", (2,), 5),
    "stopped inside of a send": (job("send4/1*", one(1, "recv4/0*", state="T"), "bar*", "bar*"), "frozen_process", (1,), 0),
    "leaves the loop, where nobody waits for what he started": (
        job(*["ar8#0@9 ar8#1@9* ag4#1@12*"] * 2, "ar8#0@9 ag4#1@12*"), "missing_participant", (2,), 6),
    "leaves out the beginning of a step": (
        job(*["bc1#0 ag2#0 ar8#0 bc1#1*"] * 3, "bc1#0 ag2#0 ar8#0 ar8#1*"), "missing_participant", (3,), 8),
    "leaves out a pair's operation, and the others' next one meets it": (
        job(one(0, "ar3:1#0 ar3:1#1 ar3:1#2 bar#2*", groups=CHAIN),
            one(1, "ar3:1#0 ar3:2#0 ar3:1#1 ar3:2#1 ar3:1#2 ar3:2#2 bar#2*", groups=CHAIN),
            one(2, "ar3:2#0 ar3:3#0 ar3:2#1 ar3:2#2 ar3:3#2 bar#2*", groups=CHAIN),
            one(3, "ar3:3#0 ar3:4#0 ar3:3#1 ar3:4#1 ar3:3#2*", groups=CHAIN), one(4, "ar3:4#0 ar3:4#1 ar3:4#2*", groups=CHAIN)),
        "missing_participant", (2,), 3),
    "reduces once more in its pair than in the step before": (
        job(one(0, "ar6:1#0 ar3#0 ar6:1#1 ar3#1*", groups=CHAIN), one(1, "ar6:1#0 ar3#0 ar6:1#1 ar6:1#1*", groups=CHAIN),
            *[one(2, "ar3#0 ar3#1*", groups=CHAIN)] * 3),
        "extra_collective", (1,), 3),
    "leaves out objects, which are two operations of one call": (
        job(*["ar8#0@9 ag1l#0@12 ag30y#0@12 ar8#1@9 ag1l#1@12*"] * 3, "ar8#0@9 ag1l#0@12 ag30y#0@12 ar8#1@9 ar8#2@9*"),
        "missing_participant", (3,), 9),
    "leaves out a whole step, and is through with the last one": (
        job(*[one(0, "ar8#0 bar#0 ar8#1 bar#1 ar8#2*", marker=marker(step=2))] * 3,
            one(3, "ar8#0 bar#0 ar8#2 bar#2", marker=marker(step=2, phase="done"), result="ok")),
        "missing_participant", (3,), 9),
    "two receive and one sends, by stacks": (
        job(*[one(0, "", stacks=(RECEIVES,))] * 2, one(2, "", stacks=(SENDS,))), "p2p_mismatch", (), 0),
    "receives from who does not send": (job("send4/1*", "recv4/2*", "bar*", "bar*"), "p2p_mismatch", (1,), 0),
    "sends to who does not listen": (job("send4/2*", "recv4/0*", "bar*", "bar*"), "p2p_mismatch", (0,), 0),
    "the same, by stacks": (job(one(0, "", stacks=(SENDS,)), one(1, "", stacks=(RECEIVES,)), "bar*", "bar*"), "p2p_mismatch", (1,), 0),
    "after the time-out alone": (
        job(*[one(0, "ar8", result=TIMED_OUT)] * 2, one(2, "", result=TIMED_OUT)), "insufficient_evidence", (), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kind_and_culprit(name: str) -> None:
    """Kind, culprits and the first visible number are right."""
    evidence, kind, ranks, seq = CASES[name]
    finding = diagnose(evidence)

    assert (kind, ranks) == (finding.kind, finding.ranks), finding
    assert seq in (0, finding.first_visible.seq)
    assert not set(finding.ranks) & set(finding.waiting)
    assert finding.explanation.endswith(".")
    assert finding.action


CALM = {
    "wrapped rings, two also busy in a subgroup": job(
        *[one(0, "ar8 ar3:1 ar8 ar3:1 ar8", wrapped=True)] * 2, *[one(2, "ar8 ar8 ar8", wrapped=True)] * 2),
    "root and others of gather and scatter": job("ga4/0 sc4/0 bar", "ga4/0 sc4/0 bar"),
    "another shape of one count": job("ar4x4 bc4x4/0 bar", "ar2x8 bc2x8/0 bar", "ar16 bc16/0 bar"),
    "one a step behind, all well": job("ar8 ar8* | ar8", "ar8 | ar8 ar8", result="ok", exit_code=0),
}  # fmt: skip


@pytest.mark.parametrize("name", CALM)
def test_no_alarm(name: str) -> None:
    """A job that is well is called so."""
    finding = diagnose(CALM[name])

    assert (finding.verdict, finding.kind, finding.ranks) == ("healthy", "healthy", ())


def test_progress_between_snapshots_is_no_hang() -> None:
    """Numbers that differ by one, and have moved in the next snapshot."""
    first, second = job("ar8 ar8*", "ar8"), job("ar8 ar8 ar8*", "ar8 ar8")
    ranks = {rank: one(rank, "") for rank in (0, 1)}
    both = {rank: type(ranks[0])(rank=rank, dumps=(*first.ranks[rank].dumps, *second.ranks[rank].dumps)) for rank in ranks}

    assert diagnose(Evidence(world_size=2, ranks=both)).verdict == "healthy"


def test_the_true_place_comes_from_steps() -> None:
    """Equal sizes hide a skipped batch for two operations; step markers do not."""
    others = "ar8#0 ar8#1 ar8#2 ar8#3*"
    finding = diagnose(job(others, others, "ar8#0 ar8#2 ar8#3 bar#3*", others))

    assert (finding.collective.seq, finding.first_visible.seq) == (6, 8)
    assert finding.confidence == "high"


def test_without_steps_the_place_is_the_visible_one() -> None:
    """It is said that the operation may have been left out before."""
    finding = diagnose(CASES["left the loop, stands in the barrier"][0])

    assert finding.collective.seq == finding.first_visible.seq == 7
    assert "at or before seq 7" in finding.explanation


def test_lateness_is_measured() -> None:
    """By when the late rank issued the operation that the others waited in."""
    finding: Finding = diagnose(CASES["came six seconds later"][0])

    assert finding.verdict == "straggler"
    assert finding.lateness_s == pytest.approx(6.0, abs=0.1)


def test_phase_tells_the_cause_of_lateness() -> None:
    """A rank that writes a checkpoint is late, not lost."""
    finding = diagnose(job("ar8*", "ar8*", one(2, "", marker=marker(phase="checkpoint"))))

    assert (finding.kind, finding.ranks, finding.cause, finding.phase) == ("late_rank", (2,), "checkpoint_io", "checkpoint")


def test_a_death_is_placed_where_it_alone_is_waited_for() -> None:
    """Most ranks wait in the group of all, for those that wait for the dead one in its own group."""
    groups = {"1": (0, 1, 2), "2": (3, 4)}
    lines = [*["ar8:1 ar3*"] * 3, "ar8:2*", one(4, "", exit_code=-11, groups=groups)]
    finding = diagnose(job(*lines, groups=groups))

    assert (finding.kind, finding.ranks, finding.first_visible.group) == ("dead_process", (4,), "2")


def test_the_exception_is_passed_on() -> None:
    """Its own words stand in the explanation."""
    finding = diagnose(CASES["raised, cleans up"][0])

    assert "ValueError: loss is nan" in finding.explanation


def test_verdict_of_an_abort_is_a_crash() -> None:
    """And the aborted rank is said to be innocent."""
    finding = diagnose(CASES["sizes differ, an innocent rank aborted"][0])

    assert finding.verdict == "crash"
    assert any("says nothing against it" in line for line in finding.evidence)


def test_unheard_rank_is_not_blamed() -> None:
    """Of a rank that left nothing, it cannot be told whether it waits as well."""
    finding = diagnose(Evidence(world_size=3, ranks={0: one(0, "ar8*"), 1: one(1, "ar8*")}))

    assert (finding.kind, finding.ranks) == ("insufficient_evidence", ())
    assert "rank 2" in finding.explanation


def test_a_stack_stands_in_for_a_missing_dump() -> None:
    """A rank without records that is in another operation by its stack."""
    known = one(2, "", stacks=(stack("barrier", "train.py:20 end"),))
    lost = type(known)(rank=2, stacks=known.stacks)
    finding = diagnose(Evidence(world_size=3, ranks={0: one(0, "ar8*"), 1: one(1, "ar8*"), 2: lost}))

    assert (finding.kind, finding.ranks) == ("missing_participant", (2,))


def test_exit_code_zero_means_nothing_where_failed_ranks_have_it() -> None:
    """A rank without records whose code is 0 may have failed like the others."""
    failed = [one(rank, "ar8 ar8*", result=TIMED_OUT, exit_code=0) for rank in range(2)]
    evidence = job(*failed, one(2, "ar8", result="ok", exit_code=0), one(3, ""))
    gone = {**evidence.ranks, 3: type(failed[0])(rank=3, exit_code=0)}

    assert diagnose(Evidence(world_size=4, ranks=gone)).ranks == (2,)


def test_equal_sides_of_a_circle_name_nobody() -> None:
    """One waits in each group, and the others' order tells nothing."""
    groups = {"1": (0, 1), "2": (0, 1)}
    finding = diagnose(job(*(one(0, line, groups=groups) for line in ("ar8:1*", "ar9:2*")), one(2, ""), one(3, "")))

    assert (finding.kind, finding.ranks, finding.group) == ("order_swap_cross_group", (), ("1", "2"))


def test_a_group_that_never_gets_made() -> None:
    """All stand in the making of a group, and one rank knows others than the rest."""
    making = stack("_new_process_group_helper", "new_group", "train.py:3 setup")
    ranks = [one(rank, "", groups={"1": (0, 1)}, stacks=(making,), result="RuntimeError: Wait timeout") for rank in range(3)]
    finding = diagnose(job(*ranks, one(3, "", stacks=(making,), result="RuntimeError: Wait timeout")))

    assert (finding.kind, finding.ranks) == ("group_membership_mismatch", ())


def test_collecting_garbage_is_late_not_frozen() -> None:
    """It holds the interpreter's lock, and it ends."""
    still = marker(beat_ns=START_NS, phase="gc")
    finding = diagnose(job(*[one(0, "ar8*", marker=marker(), taken_s=10.0)] * 2, one(2, "", marker=still, taken_s=10.0, state="R")))

    assert (finding.kind, finding.ranks, finding.cause) == ("late_rank", (2,), "gc")


def test_a_pair_left_out_is_told_by_the_other_pairs() -> None:
    """Two ranks wait for each other in two groups, one on each side; the other ranks went the way of one of them."""
    step = "ar6:{half} ar4:{pair} ar2"
    lines = []
    for rank in range(8):
        full = step.format(half="1" if rank < 4 else "2", pair=str(3 + rank // 2))
        last = {6: "ar6:2 ar2*", 7: "ar6:2 ar4:6*"}.get(rank, f"{full}*")
        lines.append(f"{full} {last}")
    finding = diagnose(job(*lines))

    assert (finding.kind, finding.ranks, finding.first_visible.group) == ("missing_participant", (6,), "6")


def test_late_for_a_time_out_is_late() -> None:
    """The others gave up before it came; what it issued after the silence does not make it one of those that waited."""
    finding = diagnose(job(*[one(0, "ar8 ar8*", result=TIMED_OUT)] * 3, one(3, "ar8 | ~ ar8", result=LOST)))

    assert (finding.kind, finding.ranks, finding.waiting) == ("late_rank", (3,), (0, 1, 2))
