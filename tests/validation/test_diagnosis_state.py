"""What a resume lost, named from the names and digests of a whole state."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.diagnosis_kinds import KINDS, Kind
from validation.diagnosis_state import diagnose_state

TENSORS = ("fc.bias", "fc.weight", "out.weight")
SAVED = (
    {f"weight/{name}": f"w-{name}" for name in TENSORS}
    | {f"ema/{name}": f"e-{name}" for name in TENSORS}
    | {f"optimizer/{name}/{key}": f"{key}-{name}" for name in TENSORS for key in ("exp_avg", "exp_avg_sq", "step")}
    | {"buffer/norm.running_mean": "mean", "buffer/norm.running_var": "var"}
    | {"plain/groups/0/lr": "0.1", "plain/groups/0/weight_decay": "0", "plain/schedule/last_epoch": "7", "plain/position": "56"}
    | {"plain/extra/scaler/scale": "65536", "plain/extra/rng/torch": "state", "plain/scalars/out.weight/step": "7"}
)
MOMENTS = [name for name in SAVED if "/exp_avg" in name]


def changed(*names: str, to: str = "other") -> dict[str, str]:
    """The saved state with some entries changed."""
    return SAVED | {name: f"{to}-{name}" for name in names}


def gone(*names: str) -> dict[str, str]:
    """The saved state without some entries."""
    return {name: sha for name, sha in SAVED.items() if name not in names}


def swapped(one: str, other: str) -> dict[str, str]:
    """The saved state with two entries exchanged."""
    return SAVED | {one: SAVED[other], other: SAVED[one]}


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        pytest.param(gone(*MOMENTS), "moments_lost", "6 of 6 optimizer moments are gone", id="moments-gone"),
        pytest.param(changed(*MOMENTS), "moments_lost", "6 of 6 optimizer moments were reset", id="moments-reset"),
        pytest.param(gone("optimizer/out.weight/exp_avg"), "moments_lost", "1 of 6", id="one-moment-gone"),
        pytest.param(
            swapped("optimizer/fc.weight/exp_avg", "optimizer/out.weight/exp_avg"), "moments_swapped",
            "optimizer/fc.weight/exp_avg holds what optimizer/out.weight/exp_avg was", id="moments-swapped",
        ),
        pytest.param(changed("optimizer/fc.bias/exp_avg"), "moments", "optimizer/fc.bias/exp_avg of 6", id="one-moment"),
        pytest.param(changed("optimizer/fc.bias/step"), "step_count", "optimizer/fc.bias/step came back", id="step-tensor"),
        pytest.param(changed("plain/scalars/out.weight/step"), "step_count", "plain/scalars/out.weight/step", id="step-scalar"),
        pytest.param(changed("plain/schedule/last_epoch", "plain/groups/0/lr"), "schedule", "2 entries", id="schedule"),
        pytest.param(changed("plain/groups/0/weight_decay"), "settings", "weight_decay", id="setting"),
        pytest.param(gone("ema/fc.bias", "ema/fc.weight", "ema/out.weight"), "averages", "are gone", id="averages-gone"),
        pytest.param(changed("ema/fc.bias"), "averages", "came back changed", id="averages"),
        pytest.param(
            SAVED | {f"weight/{name}": f"e-{name}" for name in TENSORS}, "averages_as_weights", "hold the averaged weights",
            id="averages-loaded",
        ),
        pytest.param(changed("weight/out.weight"), "weights", "weight/out.weight of 3 weights came back changed", id="one-weight"),
        pytest.param(gone("weight/out.weight"), "weights", "are gone", id="missing-weight"),
        pytest.param(changed("buffer/norm.running_mean", "buffer/norm.running_var"), "buffers", "2 entries", id="buffers"),
        pytest.param(changed("plain/extra/scaler/scale"), "loss_scale", "scale", id="loss-scale"),
        pytest.param(changed("plain/extra/rng/torch"), "random_streams", "rng", id="streams"),
        pytest.param(changed("plain/position"), "position", "plain/position", id="position"),
        pytest.param(SAVED | {"plain/extra/unheard": "x"}, "unknown", "plain/extra/unheard", id="unknown"),
    ],
)  # fmt: skip
def test_loaded(found: dict[str, str], kind: Kind, words: str) -> None:
    """What came back changed makes the kind."""
    seen = diagnose_state(SAVED, found, when="loaded")

    assert seen is not None
    assert kind == seen.kind
    assert words in seen.words


@pytest.mark.parametrize(
    ("change", "kind"),
    [(2.0**-8, "weights_rounded"), (2.0**-11, "weights_rounded"), (0.3, "weights")],
    ids=["bfloat16", "float16", "other"],
)
def test_rounded_weights(change: float, kind: Kind) -> None:
    """Known small changes of all weights are rounding."""
    names = [f"weight/{name}" for name in TENSORS]
    seen = diagnose_state(SAVED, changed(*names), when="loaded", changes=dict.fromkeys(names, change))

    assert seen is not None
    assert kind == seen.kind


def test_several_losses() -> None:
    """The first class is named, and the rest is counted."""
    seen = diagnose_state(SAVED, changed("plain/position", *MOMENTS), when="loaded")

    assert seen is not None
    assert "moments_lost" in seen.kind
    assert "besides, plain/position came back changed" in seen.words


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        pytest.param([*(f"weight/{name}" for name in TENSORS), *MOMENTS], "not_in_state", id="everything"),
        pytest.param(["weight/fc.bias"], "not_in_state", id="weights"),
        pytest.param(["ema/fc.bias"], "averages", id="averages"),
        pytest.param(["buffer/norm.running_mean"], "buffers", id="buffers"),
        pytest.param(["plain/position", "weight/fc.bias"], "position", id="position"),
        pytest.param(["plain/groups/0/lr", "weight/fc.bias"], "schedule", id="schedule"),
    ],
)
def test_later(names: list[str], kind: Kind) -> None:
    """After a right load only what stands alone, or moves everything else, is named."""
    seen = diagnose_state(SAVED, changed(*names), when="later")

    assert seen is not None
    assert kind == seen.kind


@given(st.dictionaries(st.text(max_size=12), st.text(max_size=3)), st.dictionaries(st.text(max_size=12), st.text(max_size=3)))
def test_any_names(expected: dict[str, str], found: dict[str, str]) -> None:
    """Strange names have a kind too; equal states have none."""
    for when in ("loaded", "later"):
        seen = diagnose_state(expected, found, when=when)  # type: ignore[arg-type]  # a literal in a loop

        assert (seen is None) == (expected == found)
        assert seen is None or seen.kind in KINDS
