"""Every case of examples/mutants before the real gates: wrong lines are caught and named, right ones pass."""

import pytest
from mutants.catalogue import CASES, CONTROLS, MUTANTS, REFUSED, Case
from support.hearing import hear

FAULTS = "ABCDEFGH"
QUICK = "{gradient_equivalence: {soak_repeats: {value: 3, source: a quick look}}}"  # rare faults are for the long proofs


def policy_of(case: Case) -> str:
    """The long proofs are made under the default policy."""
    return QUICK if case.is_quick else ""


def cases(chosen: tuple[Case, ...]) -> list[object]:
    """Parameters; all but the quick sample are proofs."""
    return [pytest.param(case, id=case.id, marks=() if case.is_quick else pytest.mark.proof) for case in chosen]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", cases(MUTANTS))
def test_mutant_is_caught_and_named(case, tmp_path):
    """The gate that has to see it fails, and says which tensor or kind of fault it is."""
    heard = hear(case, tmp_path, policy_text=policy_of(case))

    assert heard.gate in (case.gate, *case.also), heard
    assert heard.is_named, heard


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", cases(CONTROLS))
def test_control_passes(case, tmp_path):
    """Nothing is wrong with it, and nothing is said to be."""
    heard = hear(case, tmp_path, policy_text=policy_of(case))

    assert heard.outcome == "pass", heard


def test_quick_sample_has_every_class():
    """Each class of faults is tried in every test run, and controls beside them."""
    quick = [case for case in CASES if case.is_quick]

    assert {case.fault for case in quick} == {*FAULTS, ""}


def test_ids_are_unique():
    """No case is counted twice."""
    ids = [case.id for case in CASES]

    assert len(ids) == len(set(ids))


def test_public_cases_are_all_there():
    """Forty-seven public cases, three synthetic ones, four negative controls."""
    found = {"-".join(case.id.split("-")[:2]) for case in CASES}

    assert (sum(name.startswith("SE-") for name in found), sum(name.startswith("SYN-") for name in found)) == (47, 3)
    assert {name for name in found if name.startswith("NC-")} == {"NC-01", "NC-02", "NC-04", "NC-06"}
    assert sum(case.id.startswith("FU-") and bool(case.source) for case in CASES) >= 12


def test_refusals_are_no_way_out():
    """At most a few cases may be refused instead of caught: a gate that refuses everything would be right, too."""
    refused = [case for case in MUTANTS if REFUSED in (case.gate, *case.also)]

    assert len(refused) <= 7
