"""First bits that differ, samples, streams and rates sorted into kinds."""

from typing import Any

import pytest

from validation.diagnosis_data import Draw, diagnose_draws, diagnose_rates, diagnose_samples
from validation.diagnosis_kinds import Kind
from validation.diagnosis_ranks import BitDifference, diagnose_ranks


def difference(stage: str, **changes: Any) -> BitDifference:
    """One of nine tensors differs between ranks at step 0 of W=4."""
    given: dict[str, Any] = {
        "world_size": 4, "step": 0, "stage": stage, "tensors": ("norm.weight",), "total": 9, "ranks": (2,), "is_between_ranks": True,
        "agreeing": (),
    }  # fmt: skip
    return BitDifference(**{**given, **changes})


EVERY = tuple(f"t{number}" for number in range(9))


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        pytest.param(difference("reduced", tensors=EVERY), "no_reduction", "every rank keeps its own gradient", id="nothing"),
        pytest.param(difference("reduced", tensors=EVERY[:5], step=2), "no_reduction", "did agree before step 2", id="since-a-step"),
        pytest.param(difference("reduced"), "unreduced_tensors", "1 of 9 tensors: norm.weight", id="one-tensor"),
        pytest.param(difference("clipped", tensors=EVERY), "no_reduction", "every tensor", id="own-step"),
        pytest.param(difference("clipped", tensors=EVERY, agreeing=("reduced",)), "clipping", "each clips by its own norm", id="own-norms"),
        pytest.param(difference("clipped", agreeing=("reduced",)), "clipping", "only some clip", id="one-clipped"),
        pytest.param(difference("weight", tensors=EVERY, agreeing=("clipped",)), "initial_weights", "started from other", id="init"),
        pytest.param(difference("weight", tensors=EVERY, step=3, agreeing=("clipped",)), "update", "only some made the step", id="skip"),
        pytest.param(difference("weight", absent=("norm.weight",)), "unreduced_tensors", "no gradient of norm.weight", id="no-gradient"),
        pytest.param(difference("buffer"), "buffers", "ranks hold other buffers", id="statistics"),
        pytest.param(difference("buffer", is_between_ranks=False), "buffers", "depend on how many ranks", id="statistics-by-size"),
        pytest.param(difference("reduced", is_between_ranks=False), "world_size", "depends on how many there are", id="sizes"),
    ],
)
def test_bits(found: BitDifference, kind: Kind, words: str) -> None:
    """Stage, number of tensors and what agreed before make the kind."""
    seen = diagnose_ranks(found)

    assert kind == seen.kind
    assert words in seen.words


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        pytest.param({0: [1, 2], 1: [1, 2]}, "not_split", "all 2 ranks consumed the same samples", id="same-stream"),
        pytest.param({0: [1], 1: [1], 2: [1], 3: [1]}, "not_split", "missing: 2, 3, 4", id="one-sample-each"),
        pytest.param({0: [1, 2], 1: [2, 7]}, "rank_order", "out of different orders", id="own-seeds"),
        pytest.param({0: [1, 2], 1: [3, 9]}, "order", "samples of other steps", id="other-step"),
        pytest.param({0: [1, 2], 1: [3, 77]}, "samples", "foreign: 77; missing: 4", id="foreign"),
        pytest.param({0: [1, 2], 1: [3, 4, 4]}, "padding", "filled up with repeats (repeated or foreign: 4)", id="padding"),
        pytest.param({0: [1, 2], 1: [3]}, "padding", "cut short (missing: 4)", id="dropped"),
        pytest.param({0: [1, 2], 1: []}, "padding", "missing: 3, 4", id="lost-share"),
    ],
)
def test_samples(found: dict[int, list[int]], kind: Kind, words: str) -> None:
    """Who consumed what is repeated and missing makes the kind."""
    seen = diagnose_samples(found, [1, 2, 3, 4], elsewhere=frozenset({1, 2, 3, 4, 7, 9}))

    assert seen is not None
    assert kind == seen.kind
    assert words in seen.words


@pytest.mark.parametrize(
    "found", [{0: [1, 2], 1: [3, 4]}, {0: [4, 3, 2, 1], 1: []}, {3: [2, 4], 1: [1], 0: [3]}], ids=["two", "one", "uneven"]
)
def test_right_samples(found: dict[int, list[int]]) -> None:
    """Any split of the right samples over ranks is right."""
    assert diagnose_samples(found, [1, 2, 3, 4]) is None


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        pytest.param(Draw(0, 2), Draw(1, 2), "ranks 0 and 1 draw the same numbers in step 2", id="ranks"),
        pytest.param(Draw(0, 2), Draw(1, 4), "rank 1 draws in step 4 what rank 0 drew in step 2", id="ranks-later"),
        pytest.param(Draw(1, 0), Draw(1, 3), "the stream starts over with a step or an epoch", id="epochs"),
        pytest.param(Draw(1, 3), Draw(1, 3), "its workers or micro-batches were seeded alike", id="workers"),
    ],
)
def test_draws(one: Draw, other: Draw, words: str) -> None:
    """Who shares a stream follows from rank and step of both draws."""
    seen = diagnose_draws(one, other, "data", "numpy")

    assert (seen.kind, words in seen.words) == ("streams", True)
    assert "fetches (augmentation), generator numpy" in seen.words


WARMUP = [(0.1 * step,) for step in range(1, 7)]


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        pytest.param([(0.1,), (0.3,), (0.5,), (0.6,)], WARMUP, "once per rank in every update", id="per-rank"),
        pytest.param(WARMUP[1:], WARMUP, "one update ahead", id="ahead"),
        pytest.param([WARMUP[0], *WARMUP[:5]], WARMUP, "one update behind", id="behind"),
        pytest.param([WARMUP[0]] * 6, WARMUP, "never steps", id="never"),
        pytest.param([(2 * rate,) for (rate,) in WARMUP], WARMUP, "multiplied by 2 = W", id="scaled-by-ranks"),
        pytest.param([(3 * rate,) for (rate,) in WARMUP], WARMUP, "multiplied by 3", id="scaled"),
        pytest.param([(0.5,), (0.1,), (0.9,)], WARMUP, "another schedule", id="other"),
        pytest.param([(0.1, 0.1)] * 3, [(0.1,)] * 3, "2 parameter group(s) and that of one process 1", id="groups"),
        pytest.param([], WARMUP, "another schedule", id="nothing"),
    ],
)
def test_rates(found: list[tuple[float, ...]], expected: list[tuple[float, ...]], words: str) -> None:
    """A wrong schedule at two ranks is named by its path."""
    assert words in diagnose_rates(found, expected, 2).words


def test_a_schedule_that_steps_with_micro_batches() -> None:
    """On one rank no number of ranks can be the cause."""
    twice = [(0.1,), (0.3,), (0.5,)]

    assert "once per micro-batch, 2 times" in diagnose_rates(twice, WARMUP, 1, 2).words
    assert "once per rank" in diagnose_rates(twice, WARMUP, 2, 2).words
    assert "up to step 1" in diagnose_rates([*WARMUP[:2], (0.9,)], WARMUP, 2).words
