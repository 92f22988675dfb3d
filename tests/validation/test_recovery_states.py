"""States by name: what a load lost, and where a run parts from its twin, each class of loss seen failing by its own words."""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
import pytest
from helpers_recovery import (
    PLAN,
    STARTS,
    Change,
    consumed,
    killed,
    killed_record,
    records,
    sha,
    state,
    states,
    twin,
    ways,
    without_moments,
)

from validation.policy import parse_policy
from validation.recovery import judge_recovery
from validation.recovery_samples import compare_consumed
from validation.recovery_states import kinds_held, load_differences, shared_streams, twin_differences
from validation.verdict import GateVerdict, Outcome

POLICY = parse_policy().kill_and_resume
LOST = "state lost at a load"


def judged(change: Change, *, end: str = "other") -> GateVerdict:
    """The verdict on a run whose states were changed. Args: end, the digest of its last state."""
    run = killed(states=states(STARTS, change), record=killed_record(state_sha256_by_rank=(end, end)))
    return judge_recovery(records(killed=(run,)), POLICY)


def failed(verdict: GateVerdict) -> list[str]:
    """Names of failed checks."""
    return [item.name for item in verdict.checks if item.passed is False]


def at_loads(*names: str, gone: bool = False) -> Change:
    """A load from step 20 on that loses these parts; what follows is another training."""

    def change(attempt: int, moment: str, step: int, name: str, digest: str) -> str | None:
        if attempt >= 2 and moment == "loaded" and name in names:
            return None if gone else sha("fresh", name.rpartition("/")[2])
        return digest if attempt < 2 or (moment, step) == ("loaded", 20) else sha("other", digest)

    return change


def swapped(attempt: int, moment: str, step: int, name: str, digest: str) -> str:
    """Two equally shaped tensors get each other's moments."""
    if not attempt or not name.startswith("optimizer/"):
        return digest
    other = name.replace("fc.", "??.").replace("head.", "fc.").replace("??.", "head.")
    return state(step, 0)[other] if moment == "loaded" else sha("other", digest)


@pytest.mark.parametrize(
    ("change", "where", "words"),
    [
        pytest.param(
            without_moments, "loaded at step 5 on ranks 0, 1: optimizer/fc.weight/exp_avg and 5 more",
            "4 of 4 optimizer moments are gone", id="moments-gone",
        ),
        pytest.param(swapped, "loaded at step 5 on ranks 0, 1: optimizer/fc.weight/exp_avg", "another tensor's", id="moments-swapped"),
        pytest.param(
            at_loads("ema/fc.weight", "ema/head.weight", gone=True), "loaded at step 20 on ranks 0, 1: ema/fc.weight and 1 more",
            "of the averaged weights are gone", id="averages-gone",
        ),
        pytest.param(
            at_loads("buffer/norm.running_mean"), "loaded at step 20 on ranks 0, 1: buffer/norm.running_mean differ",
            "buffer/norm.running_mean came back changed", id="buffer",
        ),
        pytest.param(
            at_loads("plain/schedule/last_epoch"), "loaded at step 20 on ranks 0, 1: plain/schedule/last_epoch differ",
            "plain/schedule/last_epoch came back changed", id="schedule-off-by-one",
        ),
        pytest.param(at_loads("plain/extra/scaler/scale"), "plain/extra/scaler/scale differ", "came back changed", id="loss-scale"),
        pytest.param(at_loads("weight/fc.weight"), "weight/fc.weight differ", "of 2 weights came back changed", id="weight"),
        pytest.param(at_loads("plain/groups/0/weight_decay"), "plain/groups/0/weight_decay differ", "came back", id="setting"),
    ],
)  # fmt: skip
def test_what_a_load_lost_is_named(change: Change, where: str, words: str) -> None:
    """The verdict names step, ranks, part and class of what came back otherwise than it was saved."""
    verdict = judged(change)

    assert Outcome.FAIL is verdict.outcome
    assert failed(verdict) == [LOST, "difference from the twin: states", "difference from the twin: final states"]
    assert where in verdict.reason
    assert words in verdict.reason
    assert verdict.action


@pytest.mark.parametrize("name", ["buffer/norm.running_mean", "ema/fc.weight"])
def test_a_loss_that_leaves_weights_and_last_state_equal_is_seen(name: str) -> None:
    """Averages and buffers never reach the weights: the load shows their loss although the run ends with the twin's digest."""

    def change(attempt: int, moment: str, _step: int, part: str, digest: str) -> str:
        return sha("lost") if attempt == 1 and moment == "loaded" and part == name else digest

    verdict = judged(change, end="state")

    assert failed(verdict) == [LOST]


def drifted(attempt: int, moment: str, step: int, name: str, digest: str) -> str:
    """Loads are right; from the first update after the resume at step 20 on the weights are others."""
    drifts = attempt >= 2 and (moment, step) != ("loaded", 20) and name.startswith(("weight/", "optimizer/", "ema/"))
    return sha("other", digest) if drifts else digest


def test_a_drift_after_a_right_load_is_told_as_one() -> None:
    """Nothing was lost by name and the run parts from its twin: what the future depends on is in no save (random streams, data order)."""
    verdict = judged(drifted)

    assert failed(verdict) == ["difference from the twin: states", "difference from the twin: final states"]
    assert "saved at step 25 on ranks 0, 1: ema/fc.weight" in verdict.reason
    assert "what was loaded at step 20 was what was saved" in verdict.reason
    assert "random stream" in verdict.action


def test_a_stream_that_came_back_otherwise_is_told_with_the_drift() -> None:
    """A generator that every step starts anew may differ at a load; if the run drifts it is the first suspect."""

    def change(attempt: int, moment: str, step: int, name: str, digest: str) -> str:
        lost = attempt == 2 and moment == "loaded" and name == "stream/torch"
        return sha("rank 0's") if lost else drifted(attempt, moment, step, name, digest)

    verdict = judged(change)

    assert "of what was loaded at step 20 only stream/torch differed from what was saved" in verdict.reason


@pytest.mark.parametrize("name", ["stream/torch", "plain/position"])
def test_a_stream_or_position_alone_is_no_loss(name: str) -> None:
    """Where all else is the twin's, a sampler that counts otherwise since a load or a stream that is started anew lost nothing."""

    def change(attempt: int, moment: str, _step: int, part: str, digest: str) -> str:
        return sha("anew", moment) if attempt and part == name else digest

    assert Outcome.PASS is judged(change, end="state").outcome


def test_runs_that_differ_before_the_first_death_are_told_so() -> None:
    """A run that is not the same twice cannot show what a kill does."""

    def change(_attempt: int, _moment: str, _step: int, name: str, digest: str) -> str:
        return sha("other", digest) if name.startswith("weight/") else digest

    verdict = judged(change)

    assert "saved at step 5 on ranks 0, 1: weight/fc.weight and 1 more differ from the twin's; nobody had been killed" in verdict.reason


def on_other_ranks(change: Change | None = None, **changes: object) -> GateVerdict:
    """The verdict on a run of an own trainer that came back on one rank, its bits its own."""
    back = tuple(replace(way, resumed_world_size=1) for way in ways())
    moved = killed(
        same_bits=False, states=states(STARTS, change, ranks=(2, 1)),
        record=killed_record(recoveries=back, state_sha256_by_rank=("rounded otherwise",)),
    )  # fmt: skip
    return judge_recovery(records(killed=(replace(moved, **changes),), brought=("gradients",)), POLICY)  # type: ignore[arg-type]


def rounded(attempt: int, moment: str, step: int, name: str, digest: str) -> str:
    """Other ranks add in another order: every later weight and moment has other bits, and is saved and loaded with them."""
    moved = attempt >= 1 and (moment, step) != ("loaded", 5) and name.startswith(("weight/", "optimizer/", "ema/"))
    return sha("rounded", digest) if moved else digest


def test_an_own_trainer_on_other_ranks_passes_with_other_bits() -> None:
    """Its weights may round otherwise; loads, samples and learning rates are demanded all the same."""
    verdict = on_other_ranks(rounded)

    assert Outcome.PASS is verdict.outcome, verdict.reason
    assert any("on other ranks its sums round otherwise" in note for note in verdict.notes)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param("optimizer/fc.weight/exp_avg", LOST, id="moments"),
        pytest.param("plain/schedule/last_epoch", LOST, id="schedule"),
    ],
)
def test_an_own_trainer_on_other_ranks_may_lose_nothing(name: str, check: str) -> None:
    """What every rank saved alike has to come back on any number of ranks."""

    def change(attempt: int, moment: str, step: int, part: str, digest: str) -> str:
        return sha("lost") if attempt == 1 and moment == "loaded" and part == name else rounded(attempt, moment, step, part, digest)

    assert check in failed(on_other_ranks(change))


def test_a_learning_rate_that_follows_the_number_of_ranks_is_seen() -> None:
    """The global batch is the same on any number of ranks, and so is the learning rate."""

    def change(attempt: int, moment: str, step: int, name: str, digest: str) -> str:
        scaled = attempt == 1 and moment == "saved" and name == "plain/groups/0/lr"
        return sha("scaled") if scaled else rounded(attempt, moment, step, name, digest)

    assert "difference from the twin: learning rates" in failed(on_other_ranks(change))


def test_samples_that_follow_the_number_of_ranks_are_seen() -> None:
    """A position counted in steps of another world size reads other samples."""
    verdict = on_other_ranks(rounded, consumed=consumed([*range(20), *range(40, 160), *range(20)]))

    assert failed(verdict) == ["difference from the twin: samples"]
    assert "first at step 5: it consumed the samples of step 10" in verdict.reason


def test_one_ranks_stream_given_to_all_is_found_by_rank() -> None:
    """Rank by rank: rank 0's stream on rank 1 is another state, on rank 0 it is not."""
    made = states(STARTS)
    rank_0 = {step: state(step, 0)["stream/torch"] for step in STARTS}
    given = (made["moment"] == "loaded") & (made["rank"] == 1) & (made["name"] == "stream/torch")
    made.loc[given, "sha256"] = made.loc[given, "step"].map(rank_0)

    found = load_differences(made, same_ranks=True)

    assert [((1,), ("stream/torch",))] * len(STARTS) == [(item.ranks, item.names) for item in found]


def test_only_states_at_the_same_step_are_compared_with_the_twin() -> None:
    """Steps at which the twin saved nothing are left out; the last state is compared with its last one."""
    found = twin_differences(states(STARTS), states().query("step != 15"))

    assert all(not item.names for item in found)
    assert 15 not in {item.step for item in found}
    assert (found[-1].moment, found[-1].step) == ("end", 40)


def test_a_load_is_compared_with_the_newest_save_of_its_step() -> None:
    """A checkpoint that was not sealed is made again by the next attempt: that one is loaded later."""
    made = states(STARTS)
    first = made.query("attempt == 1 and moment == 'saved' and step == 20")
    torn = first.assign(attempt=0, sha256="torn")

    assert not any(item.names for item in load_differences(pd.concat([torn, made]), same_ranks=True))


def test_kinds_of_state_are_counted() -> None:
    """What a state holds is told by kind, of the lowest rank's last one."""
    held: dict[str, int] = dict(kinds_held(states(STARTS)))

    assert {
        "weights": 2,
        "averages": 2,
        "moments": 4,
        "step_count": 3,
        "buffers": 1,
        "random_streams": 1,
        "loss_scale": 1,
    }.items() <= held.items()


@pytest.mark.parametrize(
    ("samples", "contents", "words"),
    [
        pytest.param(range(160), {30: "flipped"}, "first at step 7: samples 30 came with another input, label or weight", id="content"),
        pytest.param(
            [*range(16), 99, *range(17, 160)], None, "first at step 4: samples 99 came unexpectedly; samples 16 are missing", id="sample"
        ),
        pytest.param([*range(16), *range(20, 160)], None, "first at step 4: it consumed the samples of step 5", id="skipped"),
        pytest.param(range(156), None, "first at step 39: samples 156, 157, 158, 159 are missing", id="end"),
    ],
)  # fmt: skip
def test_consumed_samples_are_compared_as_the_step_saw_them(samples: Sequence[int], contents: dict[int, str] | None, words: str) -> None:
    """The first step that consumed something else is told, with ids and whether only their contents differ."""
    found = compare_consumed(consumed(samples, contents), twin().consumed)

    assert words == found.words
    assert found.same_ids is (contents is not None)


def test_the_rank_and_the_order_of_a_sample_do_not_matter() -> None:
    """A step's samples are a multiset: other ranks take them in another order."""
    moved = consumed().assign(rank=0, micro=lambda table: table["micro"][::-1].to_numpy())

    assert compare_consumed(moved, consumed()).steps == ()


def test_lost_moments_end_the_run_elsewhere_and_the_load_says_why() -> None:
    """The first failed check is the load, and what follows says that it follows."""
    verdict = judged(without_moments)

    assert failed(verdict)[0] == LOST
    assert "it follows from the loss" in next(item.where for item in verdict.checks if item.name == "difference from the twin: states")
    assert len(PLAN) == len(ways())


def same_stream(attempt: int, moment: str, step: int, name: str, digest: str) -> str | None:
    """From the second resume on all ranks have one stream."""
    return sha(name, step) if attempt >= 2 and name.startswith("stream") and moment != "loaded" else digest


def test_ranks_that_share_a_stream_after_a_resume() -> None:
    """A rank that is new goes on in another's stream; a twin whose ranks do so all the time is no affair of a resume."""
    made = records(killed=(killed(states=states(STARTS, same_stream), same_bits=False),))
    verdict = judge_recovery(made, POLICY)
    found = next(item for item in verdict.checks if item.name == "random streams that ranks share")

    assert found.passed is False
    assert "attempt 3, after step 25: ranks 0, 1" in found.where
    assert shared_streams(made.twin.states) == []
    alike = replace(made, twin=replace(made.twin, states=made.killed[0].states))
    assert "random streams that ranks share" not in failed(judge_recovery(alike, POLICY))
    same = replace(made, killed=(replace(made.killed[0], same_bits=True),))  # its twin's states say more
    assert "random streams that ranks share" not in [item.name for item in judge_recovery(same, POLICY).checks]


def test_augmentation_of_other_ranks_is_their_own() -> None:
    """Where samples look new in each epoch, other ranks of an own trainer draw otherwise; their ids count all the same."""
    twice = [*range(80), *range(80)]
    plain = consumed(twice)
    looks = plain.assign(content=[f"{number:016x}" for number in range(len(plain))])
    other = looks.assign(content=looks["content"] + "!")

    assert compare_consumed(other, looks).steps
    assert not compare_consumed(other, looks, same_bits=False).steps
    assert compare_consumed(other.assign(sample_id=other["sample_id"] + 1), looks, same_bits=False).steps
    assert compare_consumed(plain.assign(content="!"), plain, same_bits=False).steps  # without augmentation contents are foretold
