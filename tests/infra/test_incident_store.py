"""Incidents in the object store, and the page that is made of one."""

import json
from pathlib import Path

import pytest
from helpers_incidents import make_incident
from helpers_stores import make_store

from infra.dumps import read_evidence
from infra.incident_view import gist, incident_markdown, progress_plot, rank_rows
from infra.incidents import keep_incident, list_incidents, load_incident
from infra.plots import plot_png
from infra.store import MemoryStore
from validation.errors import ConflictError, DataError

KEY = "incidents/night/20260101-000000-003"


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_what_was_kept_comes_back(tmp_path: Path, kind: str) -> None:
    """Every file, byte for byte, under the run's name, the moment and the number; keeping it again changes nothing."""
    store, folder = make_store(kind, tmp_path), make_incident(tmp_path / "003")
    assert keep_incident(store, "night", folder) == keep_incident(store, "night", folder) == KEY

    (tmp_path / "back").mkdir()
    stored, back = load_incident(store, KEY, into=tmp_path / "back")

    assert {path.name: path.read_bytes() for path in back.iterdir()} == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert (stored.place, stored.finding["kind"], list_incidents(store), list_incidents(store, "day")) == (
        KEY,
        "missing_participant",
        (KEY,),
        (),
    )


def test_a_kept_incident_is_never_changed(tmp_path: Path) -> None:
    """Another evidence under the same name is refused."""
    store, folder = MemoryStore(), make_incident(tmp_path / "003")
    keep_incident(store, "night", folder, of="kill and resume-01")
    (folder / "rank1.stack.txt").write_text("else")

    assert list_incidents(store) == ("incidents/night/20260101-000000-kill-and-resume-01-003",)
    with pytest.raises((ConflictError, DataError)) as caught:
        keep_incident(store, "night", folder, of="kill and resume-01")
    assert "rank1.stack.txt" in str(caught.value)


def test_an_incident_that_is_not_whole_is_none(tmp_path: Path) -> None:
    """The record comes last, in the folder and in the store."""
    store, folder = MemoryStore(), make_incident(tmp_path / "003")
    (folder / "incident.json").unlink()

    with pytest.raises(DataError, match=r"holds no incident\.json"):
        keep_incident(store, "night", folder)
    assert list_incidents(store) == ()


@pytest.mark.parametrize("place", [KEY, "incidents/none", "/no/such/folder", "../up"])
def test_an_unknown_incident_is_a_mistake_of_the_input(tmp_path: Path, place: str) -> None:
    """The message says what there is instead."""
    store = MemoryStore()
    keep_incident(store, "day", make_incident(tmp_path / "003"))

    with pytest.raises(DataError, match=r"there is no incident.*incidents/day/20260101-000000-003"):
        load_incident(store, place, into=tmp_path)


def test_a_record_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    """Half a record, of another program say."""
    folder = make_incident(tmp_path / "003")
    (folder / "incident.json").write_text(json.dumps({"finding": {}}))

    with pytest.raises(DataError, match=r"incident\.json of .* cannot be read"):
        load_incident(MemoryStore(), str(folder), into=tmp_path)


def test_altered_evidence_is_noticed(tmp_path: Path) -> None:
    """Nothing is concluded from bytes that nobody vouches for."""
    store = MemoryStore()
    keep_incident(store, "night", make_incident(tmp_path / "003"))
    store.delete(f"{KEY}/rank0.hang.json")
    store.put_new(f"{KEY}/rank0.hang.json", b"{}")

    (tmp_path / "back").mkdir()
    with pytest.raises(DataError, match="was altered"):
        load_incident(store, KEY, into=tmp_path / "back")


def test_the_page_names_culprit_and_victims(tmp_path: Path) -> None:
    """A row a rank, and a page that opens no tag of what ranks said."""
    stored, folder = load_incident(MemoryStore(), str(make_incident(tmp_path / "003")), into=tmp_path)
    evidence = read_evidence(folder)

    shown = ("rank", "part", "step", "phase", "process", "last operation")
    assert [tuple(row[name] for name in shown) for row in rank_rows(stored, evidence)] == [
        ("0", "waits", "1", "collective", "waiting", "all_reduce 2, not over"),
        ("1", "culprit", "1", "backward", "running", "all_reduce 1"),
    ]
    page = incident_markdown(stored, evidence, links=["[the run](http://x)"])
    assert page.startswith("## hang: missing_participant by rank 1 in attempt 0\n")
    for part in (
        "**Do next:** look at rank 1.",
        "**What was done:** restarted on 2 ranks.",
        "\\<left>",
        "[the run](http://x)",
        "data:image/png",
    ):
        assert part in page


def test_a_planned_one_asks_for_nothing(tmp_path: Path) -> None:
    """A planned fault is said to be one, and no action is asked for."""
    place = make_incident(tmp_path / "003", planned="kill:rank=1,step=7")
    stored, folder = load_incident(MemoryStore(), str(place), into=tmp_path)
    page = incident_markdown(stored, read_evidence(folder))

    assert gist(stored).endswith("planned (kill:rank=1,step=7)")
    assert "Nothing has to be done" in page
    assert "Do next" not in page


def test_the_picture_is_the_same_each_time(tmp_path: Path) -> None:
    """A line a rank, the culprit marked; the same incident gives the same bytes."""
    stored, folder = load_incident(MemoryStore(), str(make_incident(tmp_path / "003")), into=tmp_path)
    plot = progress_plot(stored, read_evidence(folder))

    assert [(series.name, series.y) for series in plot.series] == [("rank 0", (1.0, 2.0, 2.0)), ("rank 1 (culprit)", (1.0, 1.0))]
    assert plot_png(plot) == plot_png(progress_plot(stored, read_evidence(folder)))
