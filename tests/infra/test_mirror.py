"""Two tiers: what is sealed here is complete in the store, and a fresh node has it from there alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_mirror import KEY, RUN, bring, flip, make_run, mirror, train, tree
from helpers_stores import KINDS

from infra.mirror import Mirror
from infra.mirror_layout import checked_run, file_key, read_claim, stored_job, stored_steps
from infra.store import MemoryStore, ObjectStore
from validation.errors import ConfigError, DataError, StoreError

every_store = pytest.mark.parametrize("store", KINDS, indirect=True)
PART = f"runs/{RUN}/parts/attempt-0/rank-0/ledger.bin"


@every_store
def test_a_fresh_node_has_the_newest_checkpoint_and_the_rows(store: ObjectStore, tmp_path: Path) -> None:
    """What a mirror copied comes back byte for byte, file names that begin with a dot included."""
    run = make_run(tmp_path / "run", 20)

    made = mirror(store, run)
    fetched = bring(store, tmp_path / "fresh")

    assert (made.uploaded, made.problems, fetched.step, fetched.messages) == ([20, 10], [], 20, ())
    shutil.rmtree(run / "checkpoints" / "step-00000010")
    assert tree(tmp_path / "fresh") == tree(run)
    assert stored_job(store, RUN) == b'{"recipe":"tiny"}'


@every_store
def test_a_checkpoint_in_parts_comes_back(store: ObjectStore, tmp_path: Path) -> None:
    """A checkpoint larger than one part of a multipart upload is copied like any other."""
    run = make_run(tmp_path / "run")
    train(run, 10, size=11 * 2**20)

    assert mirror(store, run).problems == []
    assert bring(store, tmp_path / "fresh").step == 10
    assert tree(tmp_path / "fresh") == tree(run)


def test_each_byte_of_the_rows_is_sent_once(tmp_path: Path) -> None:
    """Every sync sends what the rows grew by, also after the mirror was started again; at the end what no checkpoint vouches for."""
    store, run = MemoryStore(), make_run(tmp_path / "run", 10)
    first = mirror(store, run)
    train(run, 20)
    first.sync()
    train(run, 30)
    second = mirror(store, run)
    (run / "parts" / "attempt-0" / "rank-0" / "ledger.bin").open("ab").write(b"more")
    second.sync()
    assert store.list(PART) == [
        f"{PART}/{span}" for span in ("000000000000-000000000320", "000000000320-000000000640", "000000000640-000000000960")
    ]

    second.sync(last=True)

    assert store.list(PART)[-1].endswith("000000000960-000000000964")
    assert bring(store, tmp_path / "fresh").step == 30


def test_only_whole_lines_are_sent(tmp_path: Path) -> None:
    """Half a line stays here: a fresh node appends to the file, and would continue the half."""
    store, run = MemoryStore(), make_run(tmp_path / "run")
    (run / "group.jsonl").write_bytes(b'{"a":1}\n{"b"')

    Mirror(store, run, RUN, key=KEY).sync(last=True)
    bring(store, tmp_path / "fresh")

    assert (tmp_path / "fresh" / "group.jsonl").read_bytes() == b'{"a":1}\n'


def test_long_rows_are_sent_in_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No segment is larger than the limit, lines are never cut, and the whole comes back."""
    monkeypatch.setattr("infra.mirror.SEGMENT_BYTES", 100)
    store, run = MemoryStore(), make_run(tmp_path / "run", 10)
    (run / "group.jsonl").write_bytes(b"".join(b'{"line":%d}\n' % number for number in range(40)))

    made = mirror(store, run)
    bring(store, tmp_path / "fresh")

    segments = [store.get(key) for key in store.list(f"runs/{RUN}/group.jsonl/")]
    assert (made.problems, max(map(len, segments)) <= 100, all(body.endswith(b"\n") for body in segments)) == ([], True, True)
    assert tree(tmp_path / "fresh") == tree(run)


@every_store
def test_the_store_keeps_two(store: ObjectStore, tmp_path: Path) -> None:
    """Older checkpoints go, with everything under them; the pointer names the newest."""
    run = make_run(tmp_path / "run")
    made = Mirror(store, run, RUN, key=KEY)
    for step in (10, 20, 30, 40):
        train(run, step)
        made.sync()

    assert stored_steps(store, RUN) == {30: True, 40: True}
    assert (made.uploaded, made.problems) == ([10, 20, 30, 40], [])
    claim, _ = read_claim(store, RUN)
    assert claim is not None
    assert claim.step == 40


def test_a_late_mirror_takes_the_newest_first(tmp_path: Path) -> None:
    """Five checkpoints stand here before the first sync: the two newest are copied, the others are history."""
    store, run = MemoryStore(), make_run(tmp_path / "run", 50)

    assert mirror(store, run).uploaded == [50, 40]
    assert stored_steps(store, RUN) == {40: True, 50: True}


class _Watched(MemoryStore):
    """A store that calls back before a write, and can be down."""

    def __init__(self) -> None:
        super().__init__()
        self.down_from = ""  # a part of a key: writes from the first such one on fail
        self.before: Callable[[str], object] = str
        self.log: list[str] = []

    def _write(self, key: str) -> None:
        self.before(key)
        self.log.append(key)
        if self.down_from and self.down_from in key:
            raise StoreError(f"cannot write '{key}': the store is down")

    def put_new(self, key: str, body: bytes) -> None:
        self._write(key)
        super().put_new(key, body)

    def put_file_new(self, key: str, path: Path, sha256: str) -> None:
        self._write(key)
        super().put_file_new(key, path, sha256)


def test_the_manifest_comes_last(tmp_path: Path) -> None:
    """Files, then rows, then their list, then the manifest."""
    store = _Watched()
    mirror(store, make_run(tmp_path / "run", 10))

    kinds = ["rows" if "-000" in key.rpartition("/")[2] else key.rpartition("/")[2] for key in store.log]
    assert kinds == ["_.metadata", "__0_0.distcp", "state.json", "rows", "rows", "rows", "PARTS.json", "MANIFEST.json"]


@pytest.mark.parametrize("where", ["_.metadata", "state.json", "ledger.bin", "PARTS.json", "MANIFEST.json"])
def test_a_store_that_dies_on_the_way(tmp_path: Path, where: str) -> None:
    """Wherever it dies, the older checkpoint is what a fresh node gets; the next sync completes the newer one."""
    store, run = _Watched(), make_run(tmp_path / "run", 10)
    made = mirror(store, run)
    train(run, 20)
    store.down_from = where
    made.sync()
    made.sync()
    assert (bring(store, tmp_path / "between").step, made.uploaded) == (10, [10])
    assert [problem.partition(":")[0] for problem in made.problems] == ["StoreError"]

    store.down_from = ""
    made.sync()

    assert (bring(store, tmp_path / "fresh").step, made.uploaded) == (20, [10, 20])


@pytest.mark.parametrize("where", ["_.metadata", "__0_0.distcp", "state.json"])
def test_retention_in_the_middle_is_no_problem(tmp_path: Path, where: str) -> None:
    """A folder that the trainer removes while it is copied is left out, and leaves no checkpoint in the store."""
    store, run = _Watched(), make_run(tmp_path / "run", 10)
    store.before = lambda key: shutil.rmtree(run / "checkpoints" / "step-00000010", ignore_errors=True) if where in key else None

    made = mirror(store, run)

    assert (made.problems, made.uploaded, stored_steps(store, RUN).get(10, False)) == ([], [], False)


def test_partial_and_damaged_folders_are_not_copied(tmp_path: Path) -> None:
    """An unsealed folder is passed over; a damaged or foreign one is a problem that names what is wrong, and its neighbour is copied."""
    store, run = MemoryStore(), make_run(tmp_path / "run", 10)
    (run / "checkpoints" / "step-00000040.partial").mkdir()
    (train(run, 20) / "state.json").write_bytes(b"[]")
    train(run, 30, key=b"x" * 32)

    made = mirror(store, run)

    assert made.uploaded == [10]
    assert ["another key" in made.problems[0], "state.json itself has sha256" in made.problems[1]] == [True, True]


def test_a_step_that_is_done_again_replaces_what_was_never_sealed(tmp_path: Path) -> None:
    """An upload that was cut off stands under the step's keys; the step sealed anew with other bytes takes its place."""
    store, run = _Watched(), make_run(tmp_path / "run", 10)
    store.down_from = "MANIFEST"
    made = mirror(store, run)
    shutil.rmtree(run / "checkpoints")
    train(run, 10, size=77)
    store.down_from = ""

    made.sync()

    assert bring(store, tmp_path / "fresh").step == 10
    assert tree(tmp_path / "fresh") == tree(run)


DAMAGE = [
    pytest.param(lambda s: flip(s, file_key(RUN, 20, "__0_0.distcp")), "was altered", id="flipped shard"),
    pytest.param(lambda s: flip(s, file_key(RUN, 20, ".metadata")), "was altered", id="flipped metadata"),
    pytest.param(lambda s: flip(s, file_key(RUN, 20, "MANIFEST.json")), "not the one", id="flipped manifest"),
    pytest.param(lambda s: flip(s, file_key(RUN, 20, "PARTS.json")), "PARTS.json is torn or altered", id="flipped list of rows"),
    pytest.param(lambda s: s.delete(file_key(RUN, 20, "state.json")), "no object", id="missing file"),
    pytest.param(lambda s: s.delete(file_key(RUN, 20, "PARTS.json")), "no object", id="missing list of rows"),
    pytest.param(lambda s: s.delete(s.list(PART)[-1]), "has 320 bytes in the store, and 640 belong", id="missing rows"),
    pytest.param(lambda s: flip(s, s.list(PART)[-1]), "ledger.bin was altered", id="flipped rows"),
    pytest.param(lambda s: s.delete(file_key(RUN, 20, "MANIFEST.json")), "older than step 20", id="missing manifest"),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGE)
def test_damage_in_the_store_falls_back_and_says_so(tmp_path: Path, damage: Callable[[ObjectStore], None], says: str) -> None:
    """Whatever is wrong with the newest checkpoint, the older one comes, with the reason and that it is older than claimed."""
    store, run = MemoryStore(), make_run(tmp_path / "run", 10)
    made = mirror(store, run)
    train(run, 20)
    made.sync()
    damage(store)

    fetched = bring(store, tmp_path / "fresh")

    assert fetched.step == 10
    assert says in " ".join(fetched.messages)
    assert "older than step 20" in fetched.messages[-1]
    assert sorted(path.name for path in (tmp_path / "fresh" / "checkpoints").iterdir()) == ["step-00000010"]


def test_a_refused_copy_is_replaced(tmp_path: Path) -> None:
    """A fresh node that fell back trains the refused step again, and its mirror puts the sound one in its place."""
    store = MemoryStore()
    mirror(store, make_run(tmp_path / "run", 20))
    flip(store, file_key(RUN, 20, "state.json"))
    fetched = bring(store, tmp_path / "fresh")
    train(tmp_path / "fresh", 20)

    made = mirror(store, tmp_path / "fresh", refused=fetched.refused)

    assert (fetched.refused, made.problems) == ((20,), [])
    assert bring(store, tmp_path / "third").step == 20


@pytest.mark.parametrize(("key", "says"), [(KEY, "was altered"), (b"x" * 32, "SEATRIAL_SEAL_KEY")], ids=["all damaged", "another key"])
def test_when_nothing_verifies_nothing_is_brought(tmp_path: Path, key: bytes, says: str) -> None:
    """No checkpoint verifies: a DataError that says why of each, and no folder."""
    store = MemoryStore()
    mirror(store, make_run(tmp_path / "run", 20))
    for step in (10, 20):
        flip(store, file_key(RUN, step, "state.json"))

    with pytest.raises(DataError, match=rf"claims step 20(?s:.*){says}"):
        bring(store, tmp_path / "fresh", key=key)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_emptied_store_is_not_a_new_run(tmp_path: Path) -> None:
    """The claim stands and every checkpoint is gone: refused, since the run would silently begin again."""
    store = MemoryStore()
    mirror(store, make_run(tmp_path / "run", 10))
    for key in store.list(f"runs/{RUN}/checkpoints/"):
        store.delete(key)

    with pytest.raises(DataError, match="none is complete"):
        bring(store, tmp_path / "fresh")


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    """A run that died before its first checkpoint comes with its rows and no step."""
    store, run = MemoryStore(), make_run(tmp_path / "run")
    Mirror(store, run, RUN, key=KEY).sync(last=True)

    assert bring(store, tmp_path / "fresh").step is None
    assert tree(tmp_path / "fresh") == tree(run)


def test_rows_that_do_not_fit_their_place_are_refused(tmp_path: Path) -> None:
    """A segment of another length than its name says is an error: what comes behind it has no place."""
    store = MemoryStore()
    mirror(store, make_run(tmp_path / "run", 10))
    key = store.list(PART)[0]
    store.delete(key)
    store.put_new(key, b"short")

    with pytest.raises(DataError, match="has 5 bytes"):
        bring(store, tmp_path / "fresh")


def test_a_fetch_that_is_cut_off_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store goes away in the middle: an error, no folder under the run's name, and the next fetch is whole."""
    store = MemoryStore()
    mirror(store, make_run(tmp_path / "run", 10))
    monkeypatch.setattr(store, "get_file", lambda *_: store.replace("x", b"", "gone"))
    with pytest.raises(StoreError):
        bring(store, tmp_path / "fresh")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

    monkeypatch.undo()
    assert bring(store, tmp_path / "fresh").step == 10


def test_a_run_that_went_on_elsewhere_is_not_written_over(tmp_path: Path) -> None:
    """Another node continued the run: this one's mirror says so and changes nothing."""
    store, run = MemoryStore(), make_run(tmp_path / "run", 10)
    mirror(store, run)
    bring(store, tmp_path / "fresh")
    train(tmp_path / "fresh", 20)
    mirror(store, tmp_path / "fresh")
    before = {key: store.get(key) for key in store.list("")}
    train(run, 30)  # as many bytes of rows, and other ones

    made = mirror(store, run)

    assert (made.uploaded, "went on somewhere else" in made.problems[0]) == ([], True)
    assert {key: store.get(key) for key in store.list("")} == before


def test_an_unreadable_claim_says_what_to_do(tmp_path: Path) -> None:
    """A pointer that is no claim stops a fetch with the key's name."""
    store = MemoryStore()
    store.put_new(f"runs/{RUN}/newest", json.dumps([1]).encode())

    with pytest.raises(StoreError, match="no claim of a checkpoint"):
        bring(store, tmp_path / "fresh")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "a" * 65, "x.partial", "a b"])
def test_a_name_that_is_no_name(name: str) -> None:
    """A run's name cannot leave its place."""
    with pytest.raises(ConfigError, match="cannot name a run"):
        checked_run(name)
