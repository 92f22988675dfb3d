"""gradient_equivalence: samples, contents, claims, order, random streams, learning rates and evaluations."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers_equivalence import BATCH, ORDER, OWN, POLICY, RATES, change, changed, records, share, with_leg, with_legs

from validation.equivalence import judge_equivalence
from validation.records import EquivalenceRecords, EvaluationCount
from validation.verdict import GateVerdict, Outcome

Table = Callable[[pd.DataFrame], pd.DataFrame]


def failed(verdict: GateVerdict) -> list[str]:
    """Names of failed checks."""
    return [item.name for item in verdict.checks if item.passed is False]


def taken(rank: int, samples: tuple[int, ...], step: int = 2) -> Table:
    """Another share of one rank in one step."""

    def take(table: pd.DataFrame) -> pd.DataFrame:
        copy = table.copy()
        copy.loc[(table["rank"] == rank) & (table["step"] == step), "sample_id"] = samples
        return copy

    return take


# Samples

ELSEWHERE = tuple(sorted(set(ORDER) - set(ORDER[2 * BATCH : 3 * BATCH])))[:4]  # samples of other steps


@pytest.mark.parametrize(
    ("consumed", "kind"),
    [
        pytest.param(taken(1, share(2, 0, 2)), "not split", id="same-stream"),
        pytest.param(taken(1, (share(2, 0, 2)[0], *ORDER[40:43])), "rank order", id="own-seed"),
        pytest.param(taken(1, ELSEWHERE), "order", id="other-step"),
        pytest.param(taken(1, (7, 8, 9, 10)), "samples", id="foreign"),
        pytest.param(
            lambda table: pd.concat([table, table[(table["step"] == 2) & (table["rank"] == 1)].head(1)]), "padding", id="repeated"
        ),
        pytest.param(lambda table: table[~((table["step"] == 2) & (table["rank"] == 1))], "padding", id="lost-share"),
    ],
)
def test_wrong_samples(consumed: Table, kind: str) -> None:
    """A step that consumed other samples than one process would is the first divergence, and sorted."""
    verdict = judge_equivalence(with_leg(records(OWN), "own", 2, consumed=consumed), POLICY)

    assert "steps with wrong samples (first in own leg, W=2, step 2)" in verdict.reason
    assert verdict.action.startswith(f"{kind}: "), verdict.action


def test_samples_of_other_legs_count() -> None:
    """A leg compared with the reference has to see the reference's samples."""
    verdict = judge_equivalence(with_leg(records(), "fast", 4, consumed=taken(1, (7, 8))), POLICY)

    assert failed(verdict) == ["steps with wrong samples"]
    assert "fast leg, W=4, step 2" in verdict.reason


def test_sampling_with_repeats_is_a_multiset() -> None:
    """A sample that one process takes twice in a step has to be taken twice."""
    twice = (ORDER[0], ORDER[0], *ORDER[2:8])
    made = records(("sampler",))
    expected = made.expected.copy()
    expected.loc[expected["step"] == 0, "sample_id"] = twice
    expected["content"] = ""

    def sampled(table: pd.DataFrame) -> pd.DataFrame:
        copy = table.copy()
        for rank in set(table["rank"]):
            size = int(table["rank"].max()) + 1
            copy.loc[(table["step"] == 0) & (table["rank"] == rank), "sample_id"] = twice[rank::size]
        return copy

    right = replace(made, expected=expected)
    for name in ("own", "logic", "training"):
        right = with_legs(right, name, consumed=sampled, ledger=lambda table: table)
    verdict = judge_equivalence(right, POLICY)

    assert "steps with wrong samples" not in failed(verdict)


def test_other_contents() -> None:
    """A right id with other bytes is named by sample, rank and step."""
    sample = share(3, 1, 2)[2]
    verdict = judge_equivalence(with_leg(records(OWN), "own", 2, consumed=change("content", "torn", step=3, sample_id=sample)), POLICY)

    assert failed(verdict) == ["samples with other contents"]
    assert f"first in own leg, W=2, step 3, rank 1: sample {sample}" in verdict.reason
    assert verdict.action.startswith("content: ")


def test_contents_that_cannot_be_foretold() -> None:
    """Random augmentation has no content to compare with."""
    made = records(OWN)
    verdict = judge_equivalence(
        with_legs(replace(made, expected=made.expected.assign(content="")), "own", consumed=change("content", "drawn")), POLICY
    )

    assert Outcome.PASS is verdict.outcome
    assert all(item.name != "samples with other contents" for item in verdict.checks)


@pytest.mark.parametrize("name", ["exact", "own"])
def test_ledger_that_claims_other_samples(name: str) -> None:
    """A loss that was never computed of a claimed sample is seen, whatever the ledger says."""
    sample = share(4, 1, 2)[0]
    lost = lambda table: table[~((table["step"] == 4) & (table["sample_id"] == sample))]  # noqa: E731 - used once
    verdict = judge_equivalence(with_leg(records(OWN if name == "own" else ()), name, 2, consumed=lost), POLICY)

    assert failed(verdict) == ["steps with wrong samples", "steps whose ledger is not what was consumed"]
    assert f"sample {sample} is claimed and no loss was computed of it" in verdict.checks[3].where


def test_position_order_of_our_trainer() -> None:
    """Right samples in another order are a fault of ours, and no matter in an own trainer."""

    def swapped(table: pd.DataFrame) -> pd.DataFrame:
        copy = table.sort_values("position").reset_index(drop=True)
        copy.loc[[9, 10], "sample_id"] = copy.loc[[10, 9], "sample_id"].to_numpy()
        return copy

    ours = judge_equivalence(with_leg(records(), "exact", 4, ledger=swapped), POLICY)

    assert failed(ours) == ["wrong ledger positions"]
    assert f"W=4, first at position 9 (step 1, lane 1): sample {ORDER[10]}, expected sample {ORDER[9]}" in ours.reason
    assert Outcome.PASS is judge_equivalence(with_leg(records(OWN), "own", 4, ledger=swapped), POLICY).outcome


@pytest.mark.parametrize("known", [True, False], ids=["foretold", "not-foretold"])
def test_samples_that_nobody_told(known: bool) -> None:
    """Samples without an id are found by their bytes, or else the ledger's claims stand, which is said."""
    made = records(OWN)
    blank = with_legs(made, "own", consumed=change("sample_id", -1))
    blank = blank if known else replace(blank, expected=made.expected.assign(content=""))
    lost = with_leg(blank, "own", 2, consumed=lambda table: table[~((table["step"] == 2) & (table["rank"] == 1))])
    clean = judge_equivalence(blank, POLICY)

    assert Outcome.PASS is clean.outcome, clean.reason
    assert known is not any("could not be told" in note for note in clean.notes)
    assert (["steps with wrong samples", "steps whose ledger is not what was consumed"] if known else []) == failed(
        judge_equivalence(lost, POLICY)
    )


def test_samples_of_equal_bytes_are_told_apart() -> None:
    """Two samples with the same bytes, both without an id, are not taken for one sample twice."""
    made = records(OWN)
    twins = {ORDER[0]: "twin", ORDER[1]: "twin"}
    same = lambda table: table.assign(content=[twins.get(s, c) for s, c in zip(table["sample_id"], table["content"], strict=True)])  # noqa: E731
    blank = with_legs(replace(made, expected=same(made.expected)), "own", consumed=lambda table: same(table).assign(sample_id=-1))

    assert Outcome.PASS is judge_equivalence(blank, POLICY).outcome


# Epochs


def ordered(*epochs: list[int]) -> Table:
    """A ledger in another order."""
    order = [sample for epoch in epochs for sample in epoch][: len(ORDER)]
    return lambda table: table.assign(sample_id=[order[position] for position in table["position"]])


EPOCH = list(ORDER[:20])


@pytest.mark.parametrize(
    ("brought", "epochs", "is_same"),
    [
        pytest.param(("sampler",), (EPOCH, EPOCH, EPOCH), True, id="same"),
        pytest.param(("sampler",), (EPOCH, EPOCH[::-1], EPOCH), False, id="other"),
        pytest.param(("sampler",), (EPOCH[:17], EPOCH[:17], EPOCH[:14]), True, id="same-and-dropped"),
        pytest.param(("loader",), (EPOCH, EPOCH, EPOCH), True, id="loader"),
        pytest.param(OWN, (EPOCH, EPOCH, EPOCH), False, id="our-order"),
    ],
)
def test_epochs_in_the_same_order(brought: tuple[str, ...], epochs: tuple[list[int], ...], is_same: bool) -> None:
    """Each sample once an epoch is not enough: a sampler that forgets the epoch repeats its order."""
    verdict = judge_equivalence(with_legs(records(brought), "own", ledger=ordered(*epochs)), POLICY)

    assert is_same is ("epochs in the same order" in failed(verdict))
    assert not is_same or any(item.action.startswith("epoch order: ") for item in verdict.checks)


def looking(place: Callable[[int], object]) -> Table:
    """Samples of a second pass over the first 24 ones; their contents by (sample, pass)."""

    def look(table: pd.DataFrame) -> pd.DataFrame:
        ids = [number % 24 for number in range(len(table))]
        return table.assign(sample_id=ids, content=[f"{sample}/{place(number // 24)}" for number, sample in enumerate(ids)])

    return look


@pytest.mark.parametrize(
    ("brought", "drawn", "place", "is_same"),
    [
        pytest.param(("loader",), True, lambda _: "same", True, id="same"),
        pytest.param(("loader",), True, lambda turn: turn, False, id="new"),
        pytest.param(("loader",), False, lambda _: "same", False, id="nothing-drawn"),
        pytest.param(("sampler",), True, lambda _: "same", False, id="our-keys"),
    ],
)
def test_samples_that_look_the_same_again(brought: tuple[str, ...], drawn: bool, place: Callable[[int], object], is_same: bool) -> None:
    """Augmentation of an own loader that is drawn by sample and not by epoch: nothing else sees it, since the reference loads alike."""
    made = replace(with_legs(records(brought), "own", consumed=looking(place)), draws_by_key=drawn)
    verdict = judge_equivalence(made, POLICY)

    assert is_same is ("samples that look the same in every epoch" in failed(verdict))


# Streams


@pytest.mark.parametrize(
    ("where", "words"),
    [
        pytest.param({"drawer": "model", "step": 2}, "forward passes (dropout), generator torch: ranks 0 and 1 draw the same", id="ranks"),
        pytest.param(
            {"drawer": "data", "rank": 1, "step": (1, 3)}, "fetches (augmentation), generator torch: rank 1 draws in step 3", id="epochs"
        ),
    ],
)
def test_shared_streams(where: dict[str, Any], words: str) -> None:
    """Two draws from one state are named with both places."""
    verdict = judge_equivalence(with_leg(records(OWN), "own", 2, streams=change("state", "same", **where)), POLICY)

    assert failed(verdict) == ["random streams used twice"]
    assert words in verdict.action


@pytest.mark.parametrize(
    ("silent", "words"),
    [("rank == 1 and step >= 4", "own leg, W=2, step 4, rank 1: none up to step 5"), ("step >= 0", "own leg, W=2, step 0, rank 0")],
)
def test_dropout_that_ends(silent: str, words: str) -> None:
    """A rank whose forward passes draw no more was left in eval mode."""
    made = with_leg(records(OWN), "own", 2, streams=lambda table: table.query(f"not (drawer == 'model' and {silent})"))
    verdict = judge_equivalence(made, POLICY)

    assert failed(verdict) == ["ranks whose dropout ends"]
    assert words in verdict.reason
    assert verdict.action.startswith("no draws: ")


@pytest.mark.parametrize("silent", ["rank == 1 and step in (1, 2)", "step == 5"])
def test_dropout_of_a_branch(silent: str) -> None:
    """A branch that some samples do not take draws now and then; without the condition nothing is asked."""
    quiet = lambda table: table.query(f"not (drawer == 'model' and {silent})")  # noqa: E731

    assert Outcome.PASS is judge_equivalence(with_leg(records(OWN), "own", 2, streams=quiet), POLICY).outcome


def test_streams_of_different_kinds_may_be_equal() -> None:
    """A forward pass and a fetch, or two generators, share no numbers by sharing a word."""
    either = lambda table: table.assign(state="same", generator=[f"g{n}" for n in range(len(table) // 2) for _ in range(2)])  # noqa: E731
    verdict = judge_equivalence(with_leg(records(), "exact", 4, streams=either), POLICY)

    assert Outcome.PASS is verdict.outcome


# Learning rates


def per_rank(table: pd.DataFrame) -> pd.DataFrame:
    """A schedule that steps once per rank."""
    size = int(table["rank"].max()) + 1
    return table.assign(rates=[RATES[min(step * size, len(RATES) - 1)] for step in table["step"]])


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        pytest.param(per_rank, "once per rank in every update", id="per-rank"),
        pytest.param(lambda t: t.assign(rates=[RATES[max(0, s - 1)] for s in t["step"]]), "one update behind", id="behind"),
        pytest.param(change("rates", "[0.4]", rank=1, step=3), "another schedule", id="one-rank"),
        pytest.param(change("rates", "[0.1,0.1]"), "update: the optimizer has 2 parameter group(s)", id="groups"),
        pytest.param(change("rates", "nothing"), "another schedule", id="unreadable"),
    ],
)
def test_wrong_rates(updates: Table, words: str) -> None:
    """Rates have to be the reference's in every update of every rank."""
    verdict = judge_equivalence(with_leg(records(OWN), "own", 2, updates=updates), POLICY)

    assert "updates with another learning rate" in failed(verdict)
    assert verdict.action.startswith(("rates: ", "update: the optimizer has"))
    assert words in verdict.action


def test_rates_come_before_the_errors_they_make() -> None:
    """A wrong rate is named, and not the updates that it made wrong."""
    made = records(OWN)
    wrong = changed(made.errors, "rel_err", 0.5, stage="weight", leg="logic", world_size=4)
    verdict = judge_equivalence(with_leg(replace(made, errors=wrong), "logic", 4, updates=per_rank), POLICY)

    assert failed(verdict) == ["updates with another learning rate", "logic leg: update, worst tensor"]
    assert verdict.action.startswith("rates: ")


def test_rounding_of_a_rate_is_none() -> None:
    """Rates that were multiplied in another order differ in their last digits."""
    verdict = judge_equivalence(with_leg(records(OWN), "own", 2, updates=change("rates", "[0.10000000000000002]", step=0)), POLICY)

    assert Outcome.PASS is verdict.outcome


# Evaluations


def evaluated(**changes: Any) -> EquivalenceRecords:
    """An own evaluation with one count changed at W=4."""
    made = records(("evaluate",))
    return replace(made, evaluations=tuple(replace(item, **changes) if item.world_size == 4 else item for item in made.evaluations))


JUDGED = tuple(range(500, 521))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        pytest.param(evaluated(sample_ids=(*JUDGED, 500, 501)), "23 counted of 21; too often: 500, 501; never: none", id="padding"),
        pytest.param(evaluated(sample_ids=JUDGED[:-1]), "20 counted of 21; too often: none; never: 520", id="dropped"),
        pytest.param(evaluated(quality=0.70001), "W=4: 0.70001 instead of 0.7", id="other-quality"),
        pytest.param(evaluated(quality=math.nan), "W=4: nan instead of 0.7", id="nan"),
    ],
)
def test_wrong_evaluation(made: EquivalenceRecords, words: str) -> None:
    """An evaluation counts every sample once and measures what one process measures."""
    verdict = judge_equivalence(made, POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert words in verdict.reason
    assert verdict.action.startswith("evaluation: ")


def test_order_of_an_evaluation_does_not_matter() -> None:
    """Ranks hand their rows in as they like; float32 scores round otherwise in other batches."""
    assert Outcome.PASS is judge_equivalence(evaluated(sample_ids=JUDGED[::-1], quality=0.7 + 1e-8), POLICY).outcome


def test_missing_evaluation() -> None:
    """An own evaluation has to be counted at the widest world size."""
    narrow = EvaluationCount(world_size=1, sample_ids=JUDGED, quality=0.7, plain_quality=0.7)
    verdict = judge_equivalence(records(("evaluate",), evaluations=(narrow,)), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert "an evaluation at W=4" in verdict.reason


def test_shares_cover_a_batch() -> None:
    """The clean records split each batch over ranks."""
    assert np.array_equal(sorted(ORDER[:BATCH]), sorted(sample for rank in range(4) for sample in share(0, rank, 4)))


@pytest.mark.parametrize(("kind", "leg"), [(OWN, "own"), ((), "exact")])
def test_a_backward_pass_that_draws_is_no_gradient_of_its_loss(kind: tuple[str, ...], leg: str) -> None:
    """Recomputed activations with other masks: named with rank and step."""
    anew = lambda table: pd.concat([table, table.query("drawer == 'model' and step == 2 and rank == 1").assign(drawer="backward")])  # noqa: E731
    verdict = judge_equivalence(with_leg(records(kind), leg, 2, streams=anew), POLICY)

    assert failed(verdict)[0] == "random numbers drawn in backward passes"
    assert "preserve_rng_state" in verdict.action


def repeated(block: int) -> list[int]:
    """Every block of samples twice, the repeat after it."""
    return [sample for first in range(0, 20, block) for sample in EPOCH[first : first + block] * 2]


@pytest.mark.parametrize(("block", "is_wrong"), [(8, True), (1, False)], ids=["whole-updates", "within-an-update"])
def test_an_order_that_comes_again_while_it_is_under_way(block: int, is_wrong: bool) -> None:
    """Loader workers that all read the whole stream repeat updates; a sampler that repeats each sample at once means it."""
    verdict = judge_equivalence(with_legs(records(("loader",)), "own", ledger=ordered(repeated(block), EPOCH)), POLICY)

    found = [item for item in verdict.checks if item.name == "epochs in the same order" and item.passed is False]
    assert bool(found) is is_wrong
    assert not is_wrong or (found[0].action.startswith("not split: ") and "loader worker" in found[0].action)
