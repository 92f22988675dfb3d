"""First divergences sorted into kinds: each kind at several sizes, with noise on top, and the neighbours it must not be taken for."""

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from validation.diagnosis import Divergence, TensorError, diagnose, uniform_factor
from validation.diagnosis_kinds import KINDS, Diagnosis, Kind, said

NAMES = tuple(f"layer{number}.weight" for number in range(9))
EPS = {"float32": 2e-7, "float64": 4e-16}


def scaled(factor: float, names: tuple[str, ...] = NAMES, noise: float = EPS["float64"]) -> tuple[TensorError, ...]:
    """Tensors that are `factor` times right, float noise on top."""
    draw = np.random.default_rng(7)
    found = []
    for name in names:
        along, across = draw.normal(size=2) * noise
        found.append(
            TensorError(name, math.hypot(factor - 1 + along, across), factor + along, math.hypot(factor - 1 + along, across) / noise)
        )
    return tuple(found)


def amounts(low: float, high: float, names: tuple[str, ...] = NAMES, *, along: float = 0.5) -> tuple[TensorError, ...]:
    """Tensors that are each off by its own amount; `along` is the share of the error that lies along the right value."""
    sizes = np.geomspace(low, high, len(names)) if len(names) > 1 else [high]
    return tuple(TensorError(name, size, 1 - along * size, size / EPS["float64"]) for name, size in zip(names, sizes, strict=True))


def divergence(found: dict[int, tuple[TensorError, ...]], **changes: Any) -> Divergence:
    """A divergence of the logic leg in the gradient before clipping, at step 0."""
    given: dict[str, Any] = {
        "leg": "logic", "step": 0, "stage": "reduced", "clean_sizes": () if 1 in found else (1,), "total": len(NAMES), "clean_stages": (),
        "clean_legs": (),
    }  # fmt: skip
    return Divergence(found=found, **{**given, **changes})


@pytest.mark.parametrize("noise", [*EPS.values(), 1e-4], ids=["float64", "float32", "loud"])
@pytest.mark.parametrize(
    ("factors", "micro_batches", "words"),
    [
        pytest.param({2: 1 / 2, 4: 1 / 4}, {}, "0.25 = 1/W: divided by the world size once too often", id="over-W"),
        pytest.param({8: 1 / 8}, {}, "0.125 = 1/W", id="over-8"),
        pytest.param({2: 2.0, 4: 4.0}, {}, "4 = W: multiplied by the world size", id="W"),
        pytest.param({1: 1 / 2, 2: 1 / 2, 4: 1 / 2}, {1: 2, 2: 2, 4: 2}, "0.5 = 1/A: divided by the number of micro-batches", id="over-A"),
        pytest.param({1: 3.0, 4: 3.0}, {1: 3, 4: 3}, "3 = A: the micro-batches' means were summed", id="A"),
        pytest.param({1: 1 / 2, 2: 1 / 4, 4: 1 / 8}, {1: 2, 2: 2, 4: 2}, "0.125 = 1/(W*A)", id="over-W-and-A"),
        pytest.param({1: 2.0, 2: 4.0, 4: 8.0}, {1: 2, 2: 2, 4: 2}, "8 = W*A: summed over ranks and micro-batches", id="W-and-A"),
        pytest.param({2: 1 / 4, 4: 1 / 16}, {}, "0.0625 = 1/W**2", id="over-W-twice"),
        pytest.param({4: 2.0, 16: 4.0}, {}, "4 = sqrt(W)", id="root"),
        pytest.param({2: 1.01, 4: 1.01}, {}, "1.01 (", id="one-percent"),
        pytest.param({4: -1.0}, {}, "-1 (", id="sign"),
        pytest.param({4: 65536.0}, {}, "6.554e+04 (", id="loss-scale"),
    ],
)  # fmt: skip
def test_one_factor_is_named(factors: dict[int, float], micro_batches: dict[int, int], words: str, noise: float) -> None:
    """A factor on every tensor is named as a power of ranks and micro-batches that fits at every measured world size."""
    found = diagnose(divergence({size: scaled(factor, noise=noise) for size, factor in factors.items()}, micro_batches=micro_batches))

    assert found.kind == "factor"
    assert f"every tensor is off by the same factor {words}" in found.words


def test_factor_that_fits_one_size_only_is_not_named() -> None:
    """A half at two ranks is no 1/W when it is a half at four ranks too."""
    found = diagnose(divergence({2: scaled(0.5), 4: scaled(0.5)}))

    assert found.kind == "factor"
    assert "=" not in found.words.partition("(")[0]


def test_two_names_for_one_factor() -> None:
    """Where ranks and micro-batches are as many, both are named."""
    assert (
        "0.5 = 1/W: divided by the world size once too often, or 1/A:" in diagnose(divergence({2: scaled(0.5)}, micro_batches={2: 2})).words
    )


def test_tensors_without_a_gradient_do_not_hide_a_factor() -> None:
    """A tensor of pure noise shows any factor, and is outvoted."""
    noise = TensorError("key.bias", 3e-16, 17.0, 9.0)

    assert diagnose(divergence({4: (*scaled(0.25), noise)}, total=10)).kind == "factor"


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        pytest.param(amounts(0.85, 0.85, NAMES[3:4]), "some_tensors", "only tensor layer3.weight is off by 0.85", id="one"),
        pytest.param(scaled(0.5, NAMES[:1]), "some_tensors", "only tensor layer0.weight is off by the factor 0.5 = 1/W", id="one-averaged"),
        pytest.param(
            scaled(0.0, NAMES[:2]), "some_tensors", "2 of 9 tensors (layer0.weight, layer1.weight) are without a gradient", id="none"
        ),
        pytest.param(amounts(0.15, 0.28, NAMES[:4]), "some_tensors", "4 of 9 tensors", id="auxiliary"),
        pytest.param(amounts(0.07, 0.72), "per_rank", "every tensor is off by 0.07 to 0.72", id="local-statistics"),
        pytest.param(amounts(0.42, 0.92, NAMES[:7]), "per_rank", "7 of 9 tensors", id="mean-of-means"),
        pytest.param(amounts(1e-6, 0.5), "per_rank", "each for itself", id="wide-spread"),
        pytest.param(scaled(0.0), "no_gradient", "every tensor is zero where the reference has a gradient", id="all-zero"),
    ],
)
def test_pattern_over_tensors(found: tuple[TensorError, ...], kind: Kind, words: str) -> None:
    """Which tensors are off, and how, makes the kind."""
    seen = diagnose(divergence({2: found}))

    assert kind == seen.kind
    assert words in seen.words
    assert "step 0, at W=2, not at W=1" in seen.words


@pytest.mark.parametrize(
    ("micro_batches", "kind"), [({1: 2}, "per_micro_batch"), ({1: 1}, "every_size"), ({}, "every_size")], ids=["two", "one", "unknown"]
)
def test_own_amounts_on_one_rank(micro_batches: dict[int, int], kind: Kind) -> None:
    """What one rank does wrong alone is the micro-batches' or the loss's, never the ranks'."""
    assert kind == diagnose(divergence({1: amounts(0.1, 0.8), 4: amounts(0.1, 0.8)}, micro_batches=micro_batches)).kind


@pytest.mark.parametrize(
    ("size", "name"), [(7e-8, "float32"), (5e-4, "float16 or TF32"), (4e-3, "bfloat16")], ids=["float32", "float16", "bfloat16"]
)
def test_rounding_in_the_logic_leg(size: float, name: str) -> None:
    """Small errors across the right value, alike in all tensors, are rounding, named by its size."""
    seen = diagnose(divergence({4: amounts(size, 2 * size, along=0.01)}))

    assert seen.kind == "precision"
    assert name in seen.words


def test_small_errors_along_the_value_are_no_rounding() -> None:
    """An auxiliary term of a small coefficient is no rounding: it differs from tensor to tensor, and has a direction."""
    assert diagnose(divergence({4: amounts(1e-3, 4e-3, along=1.0)})).kind == "per_rank"
    assert diagnose(divergence({4: amounts(1e-5, 4e-3, along=0.0)})).kind == "per_rank"


def test_precision_of_the_training_leg() -> None:
    """A float32 leg that is off beside a clean float64 leg has lost precision; a factor in it is still a factor."""
    off = divergence({4: amounts(3e-3, 6e-3, along=0.01)}, leg="training", clean_legs=("logic",))
    scale = divergence({4: scaled(65536.0, noise=EPS["float32"])}, leg="training", clean_legs=("logic",))

    assert diagnose(off).kind == "precision"
    assert "the size of bfloat16 (2**-8) rounding" in diagnose(off).words
    assert diagnose(scale).kind == "factor"


def test_only_the_fast_leg() -> None:
    """With the training leg clean only torch's own reduction is left; with it off as well the fault is the step's."""
    alone = divergence({4: amounts(0.1, 0.5)}, leg="fast", clean_legs=("logic", "training"))

    assert diagnose(alone).kind == "torch_reduction"
    assert diagnose(divergence({4: amounts(0.1, 0.5)}, leg="fast")).kind == "per_rank"


@pytest.mark.parametrize("found", [scaled(0.0), scaled(0.5), amounts(0.3, 0.9)], ids=["nothing-left", "half", "own-amounts"])
def test_bad_micro_batch_left_out(found: tuple[TensorError, ...]) -> None:
    """What is wrong in the spike leg alone is the ranks' answer to the spike, whatever it looks like."""
    assert diagnose(divergence({2: found}, leg="spike", clean_legs=("logic",))).kind == "poison"
    assert diagnose(divergence({2: found}, leg="spike")).kind != "poison"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        pytest.param({"stage": "clipped", "clean_stages": ("reduced",)}, "clipping", id="after-a-clean-stage"),
        pytest.param({"stage": "clipped", "clean_legs": ("unclipped",)}, "clipping", id="beside-a-clean-leg"),
        pytest.param({"stage": "clipped"}, "per_rank", id="nothing-known-before"),
        pytest.param({"stage": "clipped", "leg": "unclipped"}, "per_rank", id="without-clipping"),
        pytest.param({"stage": "weight", "clean_stages": ("reduced", "clipped")}, "update", id="update"),
        pytest.param({"stage": "weight", "rates_differ": True}, "rates", id="rates"),
    ],
)
def test_stage_makes_the_kind(changes: dict[str, Any], kind: Kind) -> None:
    """What is right before a stage and wrong after it is that stage's fault."""
    assert kind == diagnose(divergence({4: amounts(0.1, 0.9)}, **changes)).kind


def test_what_is_added_after_clipping() -> None:
    """A decay added to the clipped gradient of matrices is no clipping: clipped tensors are multiples of the right ones."""
    stage: dict[str, Any] = {"stage": "clipped", "clean_stages": ("reduced",)}
    added = diagnose(divergence({1: amounts(0.6, 30.0, NAMES[:2]), 2: amounts(0.6, 30.0, NAMES[:2])}, **stage))
    by_tensor = diagnose(divergence({2: (*scaled(2.0, NAMES[:1]), *scaled(0.3, NAMES[1:2]))}, **stage))

    assert (added.kind, by_tensor.kind) == ("update", "clipping")
    assert "no multiple of it" in added.words


def test_clipping_by_one_factor() -> None:
    """A norm of one rank's part gives one factor on all tensors after clipping."""
    seen = diagnose(divergence({4: scaled(2.0), 16: scaled(4.0)}, stage="clipped", clean_stages=("reduced",)))

    assert seen.kind == "clipping"
    assert "4 = sqrt(W)" in seen.words


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        pytest.param(scaled(0.0), "nothing_moves", "every tensor is not changed", id="all-still"),
        pytest.param(scaled(0.0, NAMES[:1]), "update", "only tensor layer0.weight is without a gradient or a change", id="one-still"),
        pytest.param(scaled(0.5), "update", "every tensor is off by the same factor 0.5", id="half-rate"),
        pytest.param(amounts(0.25, 0.5), "update", "off by 0.25 to 0.5", id="sharded"),
        pytest.param(
            amounts(3e-3, 6e-3, along=0.01), "update", "bfloat16 (2**-8) rounding: weights are kept in a narrower type", id="masters"
        ),
    ],
)
def test_update(found: tuple[TensorError, ...], kind: Kind, words: str) -> None:
    """Right gradients and a wrong update: nothing moves, a factor, or weights of a narrower type."""
    seen = diagnose(divergence({2: found}, stage="weight", clean_stages=("clipped",)))

    assert kind == seen.kind
    assert words in seen.words


def test_initial_weights() -> None:
    """The gradient is right at the run's own weights and wrong at the reference's, from the first step on."""
    other = {4: amounts(0.9, 1.1)}

    assert diagnose(divergence(other, clean_legs=("training",))).kind == "initial_weights"
    assert diagnose(divergence(other, clean_legs=("training",), step=2)).kind == "per_rank"
    assert diagnose(divergence(other)).kind == "per_rank"


@pytest.mark.parametrize(
    "row", [TensorError("a", math.nan, math.nan, math.nan), TensorError("a", math.inf, math.nan, math.inf)], ids=["nan", "infinite"]
)
def test_not_a_number(row: TensorError) -> None:
    """NaN and infinity come before any pattern."""
    seen = diagnose(divergence({4: (*scaled(0.5), row)}))

    assert (seen.kind, "not a number in a" in seen.words) == ("not_a_number", True)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(), st.floats(), st.floats()), min_size=1, max_size=9), st.sampled_from(["reduced", "clipped", "weight"])
)
def test_odd_numbers_have_a_kind(rows: list[tuple[float, float, float]], stage: str) -> None:
    """Whatever the numbers are, there is a kind, and no exception."""
    found = tuple(TensorError(f"t{number}", *row) for number, row in enumerate(rows))

    assert diagnose(divergence({4: found}, stage=stage)).kind in KINDS


@given(st.permutations(scaled(0.25)))
def test_order_of_tensors_does_not_matter(rows: list[TensorError]) -> None:
    """The signature is a set of tensors."""
    assert diagnose(divergence({4: tuple(rows)})) == diagnose(divergence({4: scaled(0.25)}))


def test_no_factor_among_own_amounts() -> None:
    """Amounts that happen to have a median are no factor."""
    assert uniform_factor(amounts(0.1, 0.9)) is None
    assert uniform_factor(()) is None


def test_every_kind_is_documented() -> None:
    """The closed list, its meanings and the page of the gate name the same kinds."""
    page = (Path(__file__).parents[2] / "docs" / "gates" / "gradient_equivalence.md").read_text()

    assert set(get_args(Kind)) == set(KINDS)
    for kind, meaning in KINDS.items():
        assert f"| {kind} | {meaning.signature} | {meaning.next_step} |" in page


def test_a_diagnosis_reads_as_one_sentence() -> None:
    """Kind, what was seen, what to do."""
    assert str(Diagnosis(kind="no_reduction", words="ranks disagree")) == said("no_reduction", "ranks disagree")
    assert said("no_reduction", "ranks disagree").startswith("no reduction: ranks disagree; call the wrapped module")


def test_next_steps_tell_kinds_apart() -> None:
    """No kind's next step stands in another's, so that an action names one kind."""
    steps = [meaning.next_step for meaning in KINDS.values()]

    assert all(one not in other for number, one in enumerate(steps) for place, other in enumerate(steps) if number != place)


@pytest.mark.parametrize(
    ("found", "changes", "kind"),
    [
        pytest.param({2: amounts(5e-4, 8e-3, along=0.1)}, {}, "per_rank", id="a-small-term-of-each-rank's-own"),
        pytest.param({2: amounts(3e-3, 4e-3, along=0.1)}, {}, "precision", id="all-alike"),
        pytest.param({2: amounts(5e-4, 8e-3, along=0.1)}, {"narrow": ("bfloat16",)}, "precision", id="narrow-collective"),
        pytest.param({1: amounts(5e-4, 8e-3, along=0.1)}, {}, "precision", id="on-one-rank-too"),
    ],
)
def test_small_errors_are_rounding_only_where_more_tells_so(found: Any, changes: dict[str, Any], kind: str) -> None:
    """A balancing term of one per cent has errors of the size of a narrow type's rounding."""
    assert diagnose(divergence(found, **changes)).kind == kind


def test_what_the_update_before_left() -> None:
    """Right in the first step and wrong on one rank, too: neither ranks nor micro-batches are the cause."""
    found = {1: amounts(0.1, 0.9), 2: amounts(0.1, 0.9)}

    seen = diagnose(divergence(found, step=1, micro_batches={1: 2, 2: 2}))

    assert seen.kind == "leftover"
    assert "right before step 1" in seen.words
    assert diagnose(divergence({2: amounts(0.1, 0.9)}, step=1)).kind == "per_rank"
