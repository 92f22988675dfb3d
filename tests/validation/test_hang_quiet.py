"""When a job may be called well, and what one look at it cannot tell: nothing is said by silence, nor by a single moment."""

from dataclasses import replace

import pytest
from helpers_hang import job, one, stack

from validation.diagnose import diagnose
from validation.flight import Evidence, Marker, RankEvidence, StackFrame, ThreadStack


def after(rank: int, **known: object) -> RankEvidence:
    """A rank of which only a dump from after its end is left."""
    return replace(one(rank, "ar8 |", **known), dumps=())


def ranks(*known: RankEvidence, size: int = 0) -> Evidence:
    """A job of these ranks. Args: size, of the world, where more belong to it."""
    return Evidence(world_size=size or len(known), ranks={each.rank: each for each in known})


OK, SILENT = {"result": "ok"}, RankEvidence(rank=1)


@pytest.mark.parametrize(
    ("evidence", "confidence"),
    [
        pytest.param(job("ar8", "ar8"), "high", id="dumps of all"),
        pytest.param(ranks(one(0, "ar8"), size=3), "medium", id="one dump, and two ranks that left nothing"),
        pytest.param(ranks(one(0, "ar8"), after(1)), "high", id="one dump, one of after the end"),
        pytest.param(ranks(after(0, **OK), after(1, **OK)), "high", id="no dump of the time, but all said that they are well"),
        pytest.param(ranks(*(RankEvidence(rank=rank, result="ok") for rank in (0, 1))), "high", id="nothing but good ends"),
        pytest.param(ranks(one(0, "ar8", **OK), RankEvidence(rank=1, result="ok")), "high", id="no dump of one, which ended well"),
    ],
)
def test_job_is_well(evidence: Evidence, confidence: str) -> None:
    """A record from while it ran, or good ends of all, is enough."""
    finding = diagnose(evidence)

    assert (finding.verdict, finding.kind, finding.ranks, finding.confidence) == ("healthy", "healthy", (), confidence)


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        pytest.param(ranks(after(0), after(1)), "no record from while the job ran", id="dumps of after the end alone"),
        pytest.param(ranks(after(0, **OK), after(1)), "no record from while the job ran", id="one of two said that it is well"),
        pytest.param(ranks(*(RankEvidence(rank=rank, stacks=(stack("train.py:9 main"),)) for rank in (0, 1))),
                     "no record from while the job ran", id="stacks alone"),
        pytest.param(ranks(*(RankEvidence(rank=rank, exit_code=0) for rank in (0, 1))),
                     "no record from while the job ran", id="exit codes of 0 alone"),
        pytest.param(ranks(one(0, "ar8", **OK), SILENT), "nothing was recorded, not even an end", id="an end, and an empty rank"),
        pytest.param(ranks(one(0, "ar8", **OK), size=2), "nothing was recorded, not even an end", id="an end, and a rank without a file"),
    ],
)  # fmt: skip
def test_silence_is_not_health(evidence: Evidence, said: str) -> None:
    """What was taken after the end, and what is not there, says nothing: no alarm, and no good word either."""
    finding = diagnose(evidence)

    assert (finding.verdict, finding.kind, finding.ranks, finding.confidence) == ("inconclusive", "insufficient_evidence", (), "low")
    assert said in finding.explanation


@pytest.mark.parametrize(
    ("done_at", "phase", "verdict"),
    [(2, "backward", "inconclusive"), (3, "backward", "healthy"), (2, "optimizer", "healthy")],
    ids=["an earlier step", "the same step", "nobody is within"],
)
def test_a_rank_that_is_through_early_is_not_called_well(done_at: int, phase: str, verdict: str) -> None:
    """Rings alone, after all is over: what the others did in a step that it never made is not recorded."""
    stands = ((3, phase), (done_at, "done"), (3, phase))
    markers = [Marker(step=step, phase=name) for step, name in stands]
    known = [
        replace(seen, dumps=(replace(seen.dumps[0], marker=marker),))
        for seen, marker in zip((one(rank, "ar8") for rank in range(3)), markers, strict=True)
    ]

    assert diagnose(ranks(*known)).verdict == verdict


def test_an_exception_that_ended_a_job_has_its_place() -> None:
    """All are gone when somebody looks: the others' last operation, which the rank that raised never issued, is the place."""
    lost = {"result": "DistBackendError: Connection closed by peer [127.0.0.1]:5", "exit_code": 1}
    evidence = ranks(
        one(0, "ar8 ar8", **lost), one(1, "ar8 ar8", **lost), one(2, "ar8", result="ZeroDivisionError: division by zero", exit_code=1)
    )
    finding = diagnose(evidence)

    assert (finding.kind, finding.ranks, finding.collective.op) == ("exception_path", (2,), "all_reduce")
    assert finding.collective.seq == evidence.ranks[0].dumps[0].seq[-1]


def moment(*lines: str, stacks: dict[int, str] | None = None, looks: int = 1, **known: object) -> Evidence:
    """Ranks as looked at once, or more often. Args: stacks, torch's function that a rank is inside."""
    made = {}
    for rank, line in enumerate(lines):
        seen = one(rank, line, **known)
        stands = ((stack((stacks or {})[rank], "train.py:9 step"),) * looks) if rank in (stacks or {}) else ()
        made[rank] = replace(seen, dumps=seen.dumps * looks, stacks=stands)
    return Evidence(world_size=len(lines), ranks=made)


PIPELINE = ("ar8 bar*", "ar8 bar*", "ar8 bar*", "ar8")
RECEIVES = dict.fromkeys(range(3), "barrier") | {3: "recv"}


@pytest.mark.parametrize(
    "evidence",
    [
        pytest.param(moment(*PIPELINE, stacks=RECEIVES), id="a stage receives, the others are done"),
        pytest.param(moment(*PIPELINE, stacks=RECEIVES, result="ok"), id="the same, and all ended well"),
        pytest.param(moment(*PIPELINE, result="ok"), id="the same, without stacks"),
        pytest.param(moment("ar8 bar*", "ar8 bar*", "ar8", "ar8"), id="two of four are not there yet"),
        pytest.param(moment("ar8 bar*", "ar8 bar*", "ar8", "ar8", looks=2), id="two of four are not there, by two looks"),
    ],
)
def test_one_moment_blames_nobody(evidence: Evidence) -> None:
    """Where ranks may meet the next moment, or as many are missing as wait, it cannot be told who is wrong."""
    finding = diagnose(evidence)

    assert (finding.kind, finding.ranks) == ("insufficient_evidence", ())


def test_receiver_that_stays_is_named() -> None:
    """Seen twice in the same receive, while the others wait for it: its peer is wrong, most likely."""
    finding = diagnose(moment(*PIPELINE, stacks=RECEIVES, looks=2))

    assert (finding.kind, finding.ranks, finding.confidence) == ("p2p_mismatch", (3,), "low")


COLLECTING = ThreadStack("", True, (StackFrame("<gc>", 0, "Garbage-collecting"), StackFrame("a.py", 7, "__del__")))


def test_rank_that_collects_garbage_is_late() -> None:
    """Its stack says so; a finalizer that runs in it is not the program's clean-up."""
    evidence = job("ar8*", "ar8*", one(2, "", stacks=((COLLECTING,),)))
    finding = diagnose(evidence)

    assert (finding.verdict, finding.kind, finding.ranks, finding.cause) == ("straggler", "late_rank", (2,), "gc")


def test_finalizer_that_waits_for_others_is_no_collection() -> None:
    """A barrier in a finalizer hangs, whoever called it."""
    inside = stack("barrier")[0].frames[0]
    stands = COLLECTING._replace(frames=(COLLECTING.frames[0], inside, *COLLECTING.frames[1:]))

    assert diagnose(job("ar8*", "ar8*", one(2, "", stacks=((stands,),)))).cause == ""
