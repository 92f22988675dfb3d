"""Cases of examples/hangs before the real diagnosis: hangs, crashes and late ranks are named, healthy programs are left in peace."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
from hangs.catalogue import CASES, CONTROLS, FAULTS, Case, case_of
from hangs.scoring import WRONG_BLAME, score
from support.hangs import MISSING, SHUFFLED, Tried, try_case

from validation.finding import FINDING_KINDS, Finding, Operation

QUICK = tuple(case for case in CASES if case.is_quick)
AT_A_TIME = 2
LATEST_S = 6.0  # generous, for a machine that does something else as well; benchmarks/hang_cases.py has the number


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """The quick sample, two at a time; the others when they are asked for."""
    folder = tmp_path_factory.mktemp("hangs")

    @cache
    def one(case: Case) -> Tried:
        return try_case(case, folder / case.id)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(one, QUICK))
    return one


def cases(chosen: tuple[Case, ...]) -> list[object]:
    """Parameters; all but the quick sample are proofs."""
    return [pytest.param(case, id=case.id, marks=() if case.is_quick else pytest.mark.proof) for case in chosen]


@pytest.mark.parametrize("case", cases(FAULTS))
def test_case_is_named(case, tried):
    """Kind, culprits and place are right; of late ranks phase and cause."""
    found = tried(case)

    assert found.score.is_right, (found.score, found.finding)


@pytest.mark.parametrize("case", cases(CONTROLS))
def test_control_raises_no_alarm(case, tried):
    """Nothing is wrong with it, and nothing is said to be."""
    found = tried(case)

    assert found.score.is_right, [look.finding for look in found.played.looks]


@pytest.mark.parametrize("case", cases(CASES))
def test_nobody_else_is_blamed(case, tried):
    """Whatever is missing or turned around, no rank is blamed that only waits or was aborted."""
    found = tried(case)

    assert {form: score.blamed for form, score in found.forms.items() if score.blamed} == {}


@pytest.mark.parametrize("case", cases(FAULTS))
def test_order_of_ranks_does_not_matter(case, tried):
    """The same evidence in another order is the same finding."""
    found = tried(case)

    assert found.findings[SHUFFLED] == found.finding


@pytest.mark.parametrize("case", cases(FAULTS))
def test_one_dump_less_is_enough(case, tried):
    """Where a majority is left, a waiting rank's evidence may be missing."""
    found = tried(case)

    assert MISSING not in found.forms or found.forms[MISSING].is_right, found.findings.get(MISSING)


def test_verdict_stands_soon_after_threshold(tried):
    """Eight ranks that hang are diagnosed seconds after the threshold, two snapshots included."""
    found = tried(case_of("OWN-40"))

    assert (found.case.world_size, found.played.last.why) == (8, "stall")
    assert found.verdict_s < LATEST_S


@pytest.mark.proof
@pytest.mark.parametrize("name", ["H03", "H08", "H24", "OWN-04"])
def test_small_ring_is_enough(name, tmp_path):
    """Rings of six operations are full long before these programs hang."""
    found = try_case(case_of(name), tmp_path / "small", entries=6)

    assert found.score.is_right, (found.score, found.finding)


def right_answer(case: Case) -> Finding:
    """A finding with which nothing is wrong."""
    verdict = "healthy" if case.is_control else "straggler" if case.cause else "hang"
    place = Operation(op=case.ops[0] if case.ops else "", seq=case.seq)
    return Finding(
        verdict=verdict, kind=case.kind, ranks=case.ranks[0], cause=case.cause, group=case.groups, first_visible=place,
        phase=case.phases[0] if case.phases else "", explanation=case.text, action="",
    )  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_right_answer_scores(case):
    """What the catalogue asks for can be said."""
    assert score(case, right_answer(case)).mistakes == 0


@pytest.mark.parametrize(
    ("wrong", "mistakes"),
    [
        pytest.param({"kind": "shape_mismatch"}, 1, id="kind"),
        pytest.param({"ranks": ()}, 1, id="nobody"),
        pytest.param({"ranks": (0, 1, 3)}, WRONG_BLAME, id="waiting ranks"),
        pytest.param({"group": ("1",)}, 1, id="group"),
        pytest.param({"first_visible": Operation(op="barrier", seq=9)}, 1, id="number"),
        pytest.param({"first_visible": Operation(op="gather", seq=8)}, 1, id="operation"),
    ],
)
def test_wrong_answer_does_not_score(wrong, mistakes):
    """Each part of an answer counts, and blaming those who wait counts double."""
    case = case_of("H03")

    assert score(case, replace(right_answer(case), **wrong)).mistakes == mistakes


def test_alarm_in_control_is_wrong():
    """A healthy program that is called slow is a false alarm."""
    case = case_of("N9")
    alarm = Finding(verdict="straggler", kind="late_rank", ranks=(2,), explanation="", action="")

    assert score(case, alarm).mistakes == WRONG_BLAME


def test_catalogue_is_whole():
    """All public cases and controls, ours beside them, no id twice, no kind that a finding cannot have."""
    ids = [case.id for case in CASES]

    assert len(ids) == len(set(ids))
    assert len({case.id.partition("-")[0] for case in CASES if case.id.startswith("H")}) == 30
    assert {"N1", "N2", "N4", "N5", "N8", "N9"} <= set(ids)
    assert (sum(name.startswith("OWN-") for name in ids), sum(name.startswith("CALM-") for name in ids)) >= (15, 8)
    assert {kind for case in CASES for kind in case.kinds} == set(FINDING_KINDS)
