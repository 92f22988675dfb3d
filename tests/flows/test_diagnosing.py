"""`seatrial diagnose`: what it prints for each kind of folder, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_dumps import document, entries, entry, job, write
from helpers_traces import timeline, trace

from flows.cli import main
from flows.diagnosing import diagnose_folder
from trainer.ring import RingWriter

Capture = pytest.CaptureFixture[str]
KEYS = {
    "verdict", "kind", "ranks", "group", "collective", "phase", "slowdown", "explanation", "action", "owner", "confidence", "cause",
    "first_visible", "lateness_s", "waiting", "evidence", "what_if", "problems",
}  # fmt: skip


def said(folder: Path, capsys: Capture) -> dict[str, object]:
    """The document that the command prints, and nothing else on stdout."""
    assert main(["diagnose", str(folder), "--json"]) == 0
    made: dict[str, object] = json.loads(capsys.readouterr().out)
    return made


def test_a_hung_job_is_diagnosed_from_its_dumps(tmp_path: Path, capsys: Capture) -> None:
    """Rank 2 did not come to the eighth operation; two snapshots say that nothing moves."""
    job(job(tmp_path), name="rank{}.hang2.json")

    made = said(tmp_path, capsys)

    assert set(made) >= KEYS
    assert (made["verdict"], made["ranks"], made["waiting"], made["problems"]) == ("hang", [2], [0, 1, 3], [])
    assert (made["collective"]["op"], made["collective"]["seq"], made["group"]) == ("all_reduce", 8, "0")


def test_people_read_who_why_and_what_to_do(tmp_path: Path, capsys: Capture) -> None:
    """On stderr, with every rank's last operation; stdout stays empty."""
    job(job(tmp_path), name="rank{}.hang2.json")
    (tmp_path / "rank1.result.txt").write_text("RuntimeError: [/build/gloo/buffer.cc:78] Timed out waiting")

    code = main(["diagnose", str(tmp_path)])

    out, text = capsys.readouterr()
    assert (code, out) == (0, "")
    for words in ("hang", "who: rank 2", "do: ", "evidence", "culprit", "all_reduce 8 of group 0", "not over", "RuntimeError: Timed out"):
        assert words in text


def test_what_could_not_be_read_is_said_on_stderr_and_in_the_document(tmp_path: Path, capsys: Capture) -> None:
    """A spoiled file costs its rank's dump; the others are judged."""
    job(job(tmp_path), name="rank{}.hang2.json")
    for path in tmp_path.glob("rank0.*"):
        path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")

    code = main(["diagnose", str(tmp_path), "--json"])

    out, text = capsys.readouterr()
    made = json.loads(out)
    assert (code, made["ranks"]) == (0, [2])
    assert "asks for 'os.system'" in made["problems"][0]
    assert "seatrial: note: rank0.hang.json, rank0.hang2.json, each: is a pickle" in text


@pytest.mark.parametrize("name", ["absent", "empty", "file", "jobs"])
def test_a_folder_of_which_nothing_can_be_diagnosed_ends_with_2(tmp_path: Path, capsys: Capture, name: str) -> None:
    """And says what to give."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("hello")
    for part in ("a", "b"):
        job(tmp_path / "jobs" / part)

    code = main(["diagnose", str(tmp_path / name), "--json"])

    out, text = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "Give" in text


def test_a_rank_whose_file_is_cut_is_not_blamed_for_being_behind(tmp_path: Path) -> None:
    """All wait in operation 8; rank 1's file ends before it."""
    for number in ("", "2"):
        job(tmp_path, (8, 8, 8, 8), name=f"rank{{}}.hang{number}.json")
        for rank in (0, 2, 3):
            write(tmp_path / f"rank{rank}.hang{number}.json", document(entries(8, pending=True)))
        path = tmp_path / f"rank1.hang{number}.json"
        path.write_bytes(path.read_bytes()[:1500])

    diagnosis = diagnose_folder(tmp_path)

    assert "cut off" in diagnosis.problems[0]
    assert 1 not in diagnosis.finding.ranks or diagnosis.finding.confidence != "high"


def test_a_dump_of_other_operations_still_counts_when_it_is_cut(tmp_path: Path) -> None:
    """What stands before the cut is known: rank 1 broadcast where the others reduced."""
    for number in ("", "2"):
        job(tmp_path, (8, 8, 8, 8), name=f"rank{{}}.hang{number}.json")
        odd = [entry(0), *(entry(place, profiling_name="gloo:broadcast") for place in (1, 2, 3))]
        write(tmp_path / f"rank1.hang{number}.json", document(odd))

    assert diagnose_folder(tmp_path).finding.kind != "healthy"


def test_a_runs_folder_is_read_by_its_newest_rings(tmp_path: Path, capsys: Capture) -> None:
    """Those of the attempt before say nothing of this one."""
    (tmp_path / "flight").mkdir()
    for attempt in (0, 1):
        for rank in (0, 1):
            writer = RingWriter(tmp_path / "flight" / f"attempt-{attempt}-rank-{rank}.ring", rank=rank, world_size=2, entries=16)
            writer.close()
    job(tmp_path / "incidents" / "001")
    finding = {"verdict": "hang", "kind": "missing_participant", "ranks": [2]}
    write(tmp_path / "incidents" / "001" / "incident.json", {"world_size": 4, "finding": finding})
    (tmp_path / "group.jsonl").touch()
    write(tmp_path / "parts" / "attempt-0" / "rank-1" / "end.json", {"steps": 3})

    diagnosis = diagnose_folder(tmp_path)

    assert sorted(diagnosis.evidence.ranks) == [0, 1]
    assert diagnosis.evidence.world_size == 2
    assert len(diagnosis.problems) == 1
    assert "incidents/001 (hang: missing participant of rank 2)" in diagnosis.problems[0]
    assert diagnose_folder(tmp_path / "incidents").finding.ranks == (2,)


def test_a_slow_rank_is_named_from_a_timeline(tmp_path: Path, capsys: Capture) -> None:
    """With the figures of a replay without it."""
    timeline().to_parquet(tmp_path / "timeline.parquet")

    made = said(tmp_path, capsys)

    assert (made["verdict"], made["kind"], made["ranks"], made["phase"]) == ("straggler", "late_rank", [2], "forward")
    assert made["what_if"]["S"] > 1.1


def test_a_trace_has_its_figures_under_what_if(tmp_path: Path, capsys: Capture) -> None:
    """Rank 1 computes twice as long as the others: it alone explains the slowdown."""
    trace().to_parquet(tmp_path / "trace-AR.parquet")
    (tmp_path / "meta-AR.yaml").write_text("dp_size: 4\npp_size: 1\n")

    made = said(tmp_path, capsys)

    assert (made["verdict"], made["kind"], made["ranks"], made["cause"]) == ("straggler", "late_rank", [1], "compute")
    assert made["what_if"]["S"] == made["slowdown"] > 1.5
    assert made["what_if"]["M_W"] == pytest.approx(1.0)
    assert {"S_t", "S_w", "M_S"} <= set(made["what_if"])


def test_several_traces_stand_by_name_and_the_slowest_is_the_finding(tmp_path: Path, capsys: Capture) -> None:
    """One that cannot be replayed is said."""
    trace(slow=3).to_parquet(tmp_path / "trace-AR.parquet")
    trace(factor=1.0).to_parquet(tmp_path / "trace-ST.parquet")
    trace().drop(columns=["duration"]).to_parquet(tmp_path / "trace-XX.parquet")

    made = said(tmp_path, capsys)

    assert (made["ranks"], set(made["what_if"])) == ([3], {"AR", "ST"})
    assert made["what_if"]["ST"]["S"] == pytest.approx(1.0)
    assert made["explanation"].startswith("AR: ")
    assert len(made["problems"]) == 1


def test_the_command_needs_neither_prefect_nor_mlflow_nor_torch(tmp_path: Path) -> None:
    """They take seconds to import, and who diagnoses at night does not wait for them."""
    job(tmp_path)
    program = (
        "import sys; from flows.cli import main; code = main(sys.argv[1:]); "
        "print({'torch', 'prefect', 'mlflow', 'boto3', 'scipy'} & set(sys.modules)); sys.exit(code)"
    )

    done = subprocess.run([sys.executable, "-c", program, "diagnose", str(tmp_path)], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
