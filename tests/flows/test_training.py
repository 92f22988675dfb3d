"""`seatrial train`: named runs, the second tier, and what is refused before a rank starts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from flows.cli import main

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
TINY = ["train", "tiny_recipe:long", "--json"]
TWELVE = [*TINY, "--steps", "12", "--checkpoint-every", "3"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A home and a seal key of its own."""
    folder = tmp_path / "a home"
    monkeypatch.setenv("SEATRIAL_HOME", str(folder))
    monkeypatch.setenv("SEATRIAL_SEAL_KEY", "5e" * 32)
    monkeypatch.delenv("SEATRIAL_STORE", raising=False)
    return folder


@pytest.fixture
def bucket(monkeypatch: Patch) -> Iterator["Bucket"]:
    """The settings' store is a bucket behind HTTP."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true",
        "SEATRIAL_STORE": "s3://trial/tier", "SEATRIAL_STORE_REGION": "us-east-1", "SEATRIAL_STORE_ATTEMPTS": "1",
        "SEATRIAL_STORE_READ_TIMEOUT_S": "5",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    made = Bucket()
    monkeypatch.setenv("SEATRIAL_STORE_ENDPOINT", made.endpoint)
    yield made
    made.die()


class Bucket:
    """A moto server with one bucket, which can go away."""

    def __init__(self) -> None:
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        self.endpoint = "http://{}:{}".format(*self.server.get_host_and_port())
        self.client = boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1")
        if "trial" not in {found["Name"] for found in self.client.list_buckets()["Buckets"]}:
            self.client.create_bucket(Bucket="trial")
        for key in self.keys():  # moto's memory outlives its servers
            self.client.delete_object(Bucket="trial", Key=f"tier/{key}")
        self.is_alive = True

    def keys(self) -> list[str]:
        """What stands there."""
        answer = self.client.list_objects_v2(Bucket="trial", Prefix="tier/")
        return [item["Key"].removeprefix("tier/") for item in answer.get("Contents", [])]

    def die(self) -> None:
        """Close the port."""
        if self.is_alive:
            self.server.stop()
            self.server._server.server_close()
        self.is_alive = False


def run(capsys: Capture, *options: str) -> dict[str, Any]:
    """One command that has to succeed; its document."""
    assert main(options) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def digests(document: dict[str, Any]) -> tuple[str, str]:
    """What a run ended with."""
    return document["state_sha256"], document["ledger_sha256"]


def start(options: Sequence[str]) -> subprocess.Popen[bytes]:
    """The same command in a process of its own, which can be killed."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *options], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def wait_for(condition: Any) -> None:
    """Poll for at most a minute and a half."""
    until = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.05)


def test_a_fresh_node_goes_on_from_the_store_alone(bucket: Bucket, home: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """The node of a mirrored run is killed and lost; another one, with other ranks, ends with the undisturbed run's bytes and ledger."""
    twin = run(capsys, *TWELVE)
    slow = ["--fault", "delay:rank=0,step=0,phase=data,ms=900"]
    killed = start([*TWELVE, "--world-size", "2", "--run", "night", "--mirror", *slow])
    wait_for(lambda: killed.poll() is not None or "runs/night/checkpoints/step-00000006/MANIFEST.json" in list(bucket.keys()))
    assert killed.poll() is None
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    shutil.rmtree(home)
    monkeypatch.setenv("SEATRIAL_HOME", str(tmp_path / "another home"))

    done = run(capsys, *TWELVE, "--world-size", "4", "--run", "night", "--mirror")

    assert digests(done) == digests(twin)
    assert done["mirror"]["fetched_step"] in (6, 9)
    assert (done["mirror"]["problems"], done["mirror"]["uploaded"][-1]) == ([], 12)


def test_a_store_that_dies_does_not_stop_the_training(bucket: Bucket, home: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """The store goes away after the first checkpoints: the run ends with the same bytes, and says what is missing in the store."""
    twin = run(capsys, *TWELVE)
    from infra.mirror import Mirror

    sync = Mirror.sync

    def dying(mirror: Mirror, *, last: bool = False) -> None:
        sync(mirror, last=last)
        if mirror.uploaded:
            bucket.die()

    monkeypatch.setattr(Mirror, "sync", dying)
    slow = ["--fault", "delay:rank=0,step=0,phase=data,ms=250"]

    assert main([*TWELVE, "--run", "night", "--mirror", *slow]) == 0

    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert digests(document) == digests(twin)
    assert document["mirror"]["uploaded"][-1] < 12
    assert "not reachable" in document["mirror"]["problems"][0]
    assert "not reachable" in shown.err


def test_a_named_run_goes_on_where_it_stopped(home: Path, capsys: Capture) -> None:
    """Six steps, then six more by the same name on other ranks: the bytes of twelve at once."""
    run(capsys, *TINY, "--run", "night", "--steps", "6", "--checkpoint-every", "3", "--world-size", "2")

    done = run(capsys, *TWELVE, "--run", "night", "--world-size", "3")

    assert digests(done) == digests(run(capsys, *TWELVE))
    assert (done["steps"], done["folder"]) == (12, str(home / "runs" / "night"))


def test_a_damaged_checkpoint_is_passed_over_aloud(home: Path, capsys: Capture) -> None:
    """A run that goes on from an older checkpoint than the newest says which one was refused and why, to people and in the document."""
    run(capsys, *TINY, "--run", "night", "--steps", "10", "--checkpoint-every", "3")
    (home / "runs/night/checkpoints/step-00000009/state.json").write_text("{}")

    assert main([*TWELVE, "--run", "night"]) == 0

    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert ["checkpoint step-00000009 is damaged: state.json" in said for said in document["refused"]] == [True]
    assert "checkpoint step-00000009 is damaged" in shown.err
    assert digests(document) == digests(run(capsys, *TWELVE))


@pytest.mark.parametrize("damage", [shutil.rmtree, lambda parts: os.truncate(parts / "attempt-0/rank-0/ids.bin", 50)], ids=["gone", "cut"])
def test_a_ledger_with_a_hole_is_no_result(home: Path, capsys: Capture, damage: Any) -> None:
    """A run whose earlier rows are gone ends with an error instead of the sha256 of a ledger that leaves samples out."""
    run(capsys, *TINY, "--run", "night", "--steps", "10", "--checkpoint-every", "3")
    damage(home / "runs/night/parts")

    assert main([*TWELVE, "--run", "night"]) == 1
    assert "row files of earlier attempts are missing or cut short" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(["--reduction", "fast"], "reduction 'exact' there, 'fast' asked for", id="reduction"),
        pytest.param(["--mirror", "--checkpoint-every", "2"], "", id="mirror later is fine"),
    ],
)
def test_what_a_continuation_may_change(capsys: Capture, options: list[str], says: str) -> None:
    """Ranks, steps and the mirror may change; the reduction may not."""
    run(capsys, *TINY, "--run", "night", "--steps", "3", "--checkpoint-every", "3")

    code = main([*TINY, "--run", "night", "--steps", "4", *options])

    assert code == (2 if says else 0)
    assert says in capsys.readouterr().err


def test_another_recipe_is_another_run(capsys: Capture, home: Path) -> None:
    """A run is not continued with another recipe, and nothing in its folder changes."""
    run(capsys, *TINY, "--run", "night", "--steps", "3")
    before = sorted(home.rglob("runs/**/*"))

    assert main(["train", "tiny_recipe:recipe", "--run", "night"]) == 2
    assert "is another training: recipe 'tiny_recipe:long' there" in capsys.readouterr().err
    assert sorted(home.rglob("runs/**/*")) == before


def test_a_folder_that_is_behind_the_store_is_not_continued(home: Path, capsys: Capture) -> None:
    """Another node went on with the run: this one says so and starts nothing."""
    run(capsys, *TWELVE, "--run", "night", "--mirror")
    for sealed in (home / "runs" / "night" / "checkpoints").glob("step-*12"):
        shutil.rmtree(sealed)

    assert main([*TWELVE, "--run", "night", "--mirror"]) == 2
    assert "the store has step 12" in capsys.readouterr().err


def test_a_stored_run_without_its_job_is_not_begun_again(home: Path, capsys: Capture) -> None:
    """The store claims a step and has lost job.json: exit 2, not step 0."""
    run(capsys, *TWELVE, "--run", "night", "--mirror")
    shutil.rmtree(home / "runs" / "night")
    for part in (home / "store").rglob("job.json"):
        shutil.rmtree(part) if part.is_dir() else part.unlink()

    assert main([*TWELVE, "--run", "night", "--mirror"]) == 2
    assert "has step 12 of run night and not its job.json" in capsys.readouterr().err
    assert not (home / "runs" / "night").exists()


def test_recoveries_are_told_by_segment(capsys: Capture) -> None:
    """Two deaths, fewer ranks each time: each recovery with its segments, and what it would be on eight GPUs."""
    faults = ["--fault", "kill:rank=3,step=4,phase=backward", "--fault", "kill:rank=1,step=8,phase=optimizer,attempt=1"]

    assert main([*TWELVE, "--world-size", "4", "--resume-world-sizes", "2,1", *faults]) == 0

    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert [found["resumed_world_size"] for found in document["recoveries"]] == [2, 1]
    assert {"detect_s", "teardown_s", "import_s", "rendezvous_s", "load_s", "first_step_s", "total_s"} <= document["recoveries"][0].keys()
    assert "rendezvous" in shown.err
    assert "8 GPUs" in shown.err
    assert digests(document) == digests(run(capsys, *TWELVE))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(["--run", "../x"], "cannot name a run", id="path in a name"),
        pytest.param(["--run", "a b"], "cannot name a run", id="space in a name"),
        pytest.param(["--world-size", "-1"], "at least 1", id="negative ranks"),
        pytest.param(["--checkpoint-every", "-1"], "at least 0", id="negative checkpoints"),
        pytest.param(["--max-restarts", "-1"], "at least 0", id="negative restarts"),
        pytest.param(["--resume-world-sizes", "2,0"], "at least 1", id="no ranks left"),
        pytest.param(["--resume-world-sizes", "two"], "--resume-world-sizes 'two' are not whole", id="ranks in words"),
        pytest.param(["--resume-world-sizes", "9"], "lanes", id="more ranks than lanes later"),
        pytest.param(["--parallel", "fsdp2", "--world-size", "3"], "1, 2, 4", id="fsdp2 on three"),
        pytest.param(["--parallel", "fsdp2", "--world-size", "4", "--resume-world-sizes", "3"], "1, 2, 4", id="fsdp2 on three later"),
        pytest.param(["--mirror", "--checkpoint-every", "0"], "nothing to copy", id="mirror of nothing"),
        pytest.param(["--fault", "kill:rank=0,step=3,step=4"], "stands there twice", id="two steps of one fault"),
        pytest.param(["--fault", "kill:rank=0,step=2", "--max-restarts", "0"], "Allow 1", id="too few restarts"),
        pytest.param(["--fault", "launcher:rank=0,step=2", "--max-restarts", "0"], "Allow 1", id="launcher without a restart"),
        pytest.param(["--fault", "kill:rank=0,step=2,phase=seal", "--checkpoint-every", "0"], "cannot fire", id="no checkpoint to die in"),
        pytest.param(
            ["--steps", "8", "--fault", "kill:rank=0,step=6,phase=write", "--checkpoint-every", "3"], "cannot fire", id="checkpoint is over"
        ),
        pytest.param(
            ["--world-size", "2", "--resume-world-sizes", "1", "--fault", "kill:rank=1,step=2,attempt=1"], "cannot fire", id="rank is gone"
        ),
    ],
)
def test_bad_options_start_nothing(home: Path, capsys: Capture, options: list[str], says: str) -> None:
    """Exit 2 with what to do, and no run's folder."""
    assert main([*TINY, *options]) == 2

    assert says in capsys.readouterr().err
    assert list(home.glob("runs/*")) == []


def test_an_unknown_parallelism_is_refused(capsys: Capture) -> None:
    """argparse names the choices and exits 2."""
    with pytest.raises(SystemExit, match="2"):
        main([*TINY, "--parallel", "pipeline"])
    assert "fsdp2" in capsys.readouterr().err


@pytest.mark.parametrize("store", ["below/a file/store", "s3://absent"], ids=["folder", "bucket"])
def test_a_mirror_without_a_store_is_refused(
    bucket: Bucket, tmp_path: Path, home: Path, capsys: Capture, monkeypatch: Patch, store: str
) -> None:
    """--mirror needs a store that can be written: exit 2, nothing started."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a file").write_text("")
    monkeypatch.setenv("SEATRIAL_STORE", store if "://" in store else str(tmp_path / store))

    assert main([*TINY, "--mirror"]) == 2
    assert "SEATRIAL_STORE" in capsys.readouterr().err
    assert list(home.glob("runs/*")) == []


def test_a_foreign_folder_is_left_alone(home: Path, capsys: Capture) -> None:
    """A folder of that name that is no run is refused and not touched."""
    (home / "runs" / "night").mkdir(parents=True)
    (home / "runs" / "night" / "notes.txt").write_text("mine")

    assert main([*TINY, "--run", "night"]) == 2
    assert "no run of `seatrial train`" in capsys.readouterr().err
    assert [path.name for path in (home / "runs" / "night").iterdir()] == ["notes.txt"]
