"""`seatrial check`: gates on a recipe without a release, through the command."""

import json
from pathlib import Path

import pytest

from flows.cli import EXIT_DONE, EXIT_INPUT, EXIT_REFUSED, main

ONLY_TWO_RANKS = ["--world-sizes", "1,2", "--json"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, in a path with a space."""
    folder = tmp_path / "a home"
    monkeypatch.setenv("SEATRIAL_HOME", str(folder))
    for name in ("SEATRIAL_STORE", "SEATRIAL_CACHE", "MLFLOW_TRACKING_URI", "PREFECT_HOME"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_a_right_recipe_passes_both_gates_and_leaves_no_release(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0, both verdicts on stdout; no journal, store or registry appears."""
    code = main(["check", "tiny_recipe:recipe", *ONLY_TWO_RANKS])

    document = json.loads(capsys.readouterr().out)
    assert [(gate["name"], gate["outcome"]) for gate in document["gates"]] == [
        ("gradient_equivalence", "pass"),
        ("kill_and_resume", "pass"),
    ]
    assert code == EXIT_DONE
    assert all(gate["control"]["caught"] for gate in document["gates"])
    assert not (home / "store").exists()
    assert not (home / "mlflow.db").exists()


def test_a_wrong_trainer_is_refused_with_tensor_and_class(capsys: pytest.CaptureFixture[str]) -> None:
    """A mean over ranks of local means: exit 3, and the reason names the first divergence."""
    code = main(["check", "wrong_trainer:recipe", "--gate", "gradient_equivalence", *ONLY_TWO_RANKS])

    [gate] = json.loads(capsys.readouterr().out)["gates"]
    assert (code, gate["outcome"]) == (EXIT_REFUSED, "fail")
    assert "leg" in gate["reason"]
    assert "normalis" in gate["action"]


@pytest.mark.parametrize("sizes", ["1", "0,2", "-1,2"])
def test_too_few_ranks_are_bad_input(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing can be compared on one rank, and there is no rank below one: exit 2, in words about these gates."""
    code = main(["check", "tiny_recipe:recipe", f"--world-sizes={sizes}"])

    assert code == EXIT_INPUT
    assert "at least two ranks" in capsys.readouterr().err
