"""What the reconciler needs of the registry: aliases that stay as they were set, versions found again, marked, and their files digested."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ErrorCode

from infra.export import FILES_TAG, files_sha256
from infra.pointer import Pointer, move_pointer, pointer_key, read_pointer
from infra.registry import Mirrored, Registry, mirror_current
from infra.settings import Settings
from infra.store import MemoryStore
from validation.errors import ConflictError, StoreError


@pytest.fixture
def model(request: pytest.FixtureRequest, registry: Registry, registry_settings: Settings) -> str:
    """A model of three versions whose files are one text file each; no two tests share one."""
    name = request.node.name.removeprefix("test_").replace("_", "-").replace("[", "-").replace("]", "")
    registry._client.create_registered_model(name)
    for number in "123":
        folder = files(registry_settings, name, number)
        folder.mkdir(parents=True)
        (folder / "weights").write_text(number)
        registry._client.create_model_version(name, source=str(folder))
    return name


def files(settings: Settings, model: str, version: str) -> Path:
    """Where a version's files lie."""
    return settings.home / "files" / model / version


def pointer(model: str, **given: Any) -> Pointer:
    """Version 3 serves, 2 is last known-good, 1 the baseline."""
    usual = Pointer(
        model=model, serving_version="3", serving_kind="candidate", last_known_good="2", baseline="1",
        release_id="boat-20260131-181542-3f9c", sequence=3,
    )  # fmt: skip
    return replace(usual, **given)


class Meddling:
    """A client in which somebody else does something right after an alias was set, so many times."""

    def __init__(self, client: Any, does: Callable[[Any], None], times: int) -> None:
        self._client, self._does, self._left = client, does, times

    def set_registered_model_alias(self, *given: Any) -> None:
        self._client.set_registered_model_alias(*given)
        if self._left > 0:
            self._left -= 1
            self._does(self._client)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def meddling(registry: Registry, monkeypatch: pytest.MonkeyPatch, does: Callable[[Any], None], times: int) -> None:
    """Let somebody else meddle with this registry."""
    monkeypatch.setattr(registry, "_client", Meddling(registry._client, does, times))


def test_an_alias_is_read_back(registry: Registry, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody moves it right after it was set: it is set again."""
    meddling(registry, monkeypatch, lambda client: client.set_registered_model_alias(model, "champion", "1"), 2)

    assert registry.mirror(pointer(model)) == ("champion", "last-known-good", "baseline")
    assert registry.aliases(model) == {"champion": "3", "last-known-good": "2", "baseline": "1"}


def test_somebody_who_never_stops_is_an_error(registry: Registry, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some tries it is said, with the next step; what serves is not touched by it."""
    meddling(registry, monkeypatch, lambda client: client.set_registered_model_alias(model, "champion", "1"), 100)

    with pytest.raises(ConflictError, match="seatrial reconcile"):
        registry.mirror(pointer(model))


def test_a_version_that_was_deleted_gets_no_alias(registry: Registry, model: str) -> None:
    """The others are set all the same, and nothing is left to change."""
    registry._client.delete_model_version(model, "3")
    registry.mirror(pointer(model))

    assert registry.all_aliases(model) == {"last-known-good": "2", "baseline": "1"}
    assert registry.mirror(pointer(model)) == ()


def test_a_version_that_is_deleted_meanwhile_gets_no_alias(registry: Registry, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted between two of our calls: no error, and the rest stands."""
    meddling(registry, monkeypatch, lambda client: client.delete_model_version(model, "2"), 1)
    registry.mirror(pointer(model))

    assert registry.all_aliases(model) == {"champion": "3", "baseline": "1"}


def test_a_model_that_is_not_registered_is_an_error(registry: Registry) -> None:
    """There is nothing to set aliases on."""
    with pytest.raises(StoreError, match="set the aliases of nobody"):
        registry.mirror(pointer("nobody"))


def test_what_was_mirrored_is_on_record(registry: Registry, model: str) -> None:
    """Before the first alias is set what stood there is written down, and that all is done after they were read back."""
    assert registry.mirrored(model) == Mirrored(sequence=0, after={}, before={})
    registry.mirror(pointer(model))
    wanted = {"champion": "3", "last-known-good": "2", "baseline": "1"}
    assert registry.mirrored(model) == Mirrored(sequence=3, after=wanted, before={})

    registry._client.set_registered_model_tag(model, "sea_trial.aliases", "edited by hand")
    assert registry.mirrored(model).sequence == 0


def test_a_process_that_dies_half_way_leaves_that_record(registry: Registry, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first alias of a move from 2 to 3 the old and the new one are both known as ours."""
    registry.mirror(pointer(model, serving_version="2", last_known_good="", sequence=2))

    def die(_: Any) -> None:
        raise KeyboardInterrupt

    meddling(registry, monkeypatch, die, 1)
    with pytest.raises(KeyboardInterrupt):
        registry.mirror(pointer(model))
    said = registry.mirrored(model)
    assert (said.sequence, said.after["champion"], said.before["champion"]) == (3, "3", "2")


def test_the_aliases_follow_a_pointer_that_moves_meanwhile(registry: Registry, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release moves it while its aliases are set: they end where it ends."""
    store = MemoryStore()
    move_pointer(store, pointer(model), None)

    def move(_: Any) -> None:
        _, etag = read_pointer(store, model)
        move_pointer(store, pointer(model, serving_version="2", last_known_good="", sequence=4), etag)

    meddling(registry, monkeypatch, move, 1)
    mirror_current(registry, store, model)
    assert registry.aliases(model) == {"champion": "2", "baseline": "1"}


def test_eight_at_once_end_where_the_pointer_is(registry_settings: Settings, model: str) -> None:
    """Each with a client of its own sets the aliases of the same pointer: none fails, and they say what it says."""
    store = MemoryStore()
    move_pointer(store, pointer(model), None)
    failed: list[BaseException] = []

    def mirror() -> None:
        try:
            mirror_current(Registry(registry_settings), store, model)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=mirror) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert Registry(registry_settings).aliases(model) == {"champion": "3", "last-known-good": "2", "baseline": "1"}
    assert store.exists(pointer_key(model))


@pytest.mark.parametrize("code", ["BAD_REQUEST", "TEMPORARILY_UNAVAILABLE"])
@pytest.mark.parametrize("write", ["set_registered_model_tag", "set_registered_model_alias"])
def test_a_write_that_lost_a_race_is_repeated(
    registry: Registry, model: str, monkeypatch: pytest.MonkeyPatch, write: str, code: str
) -> None:
    """Another process inserted the same tag between MLflow's look and its insert, or held the database's lock."""
    plain, refusals = getattr(registry._client, write), iter(range(2))

    def raced(*given: Any) -> None:
        if next(refusals, None) is not None:
            raise MlflowException("UNIQUE constraint failed", error_code=ErrorCode.Value(code))
        plain(*given)

    monkeypatch.setattr(registry._client, write, raced)
    registry.mirror(pointer(model))

    assert registry.aliases(model) == {"champion": "3", "last-known-good": "2", "baseline": "1"}
    assert registry.mirrored(model).after["champion"] == "3"


@pytest.mark.parametrize(("code", "tries"), [("BAD_REQUEST", 5), ("INVALID_PARAMETER_VALUE", 1)])
def test_a_write_that_is_always_refused_is_an_error(
    registry: Registry, model: str, monkeypatch: pytest.MonkeyPatch, code: str, tries: int
) -> None:
    """What no other process can have caused is not repeated at all."""
    tried = []

    def refused(*given: Any) -> None:
        tried.append(given)
        raise MlflowException("never", error_code=ErrorCode.Value(code))

    monkeypatch.setattr(registry._client, "set_registered_model_tag", refused)
    with pytest.raises(StoreError, match="every step may be repeated"):
        registry.mirror(pointer(model))
    assert len(tried) == tries


def test_a_version_is_found_again_by_its_tags(registry: Registry, model: str, registry_settings: Settings) -> None:
    """A killed process had registered it: of two alike the oldest is found, and another run's is not."""
    run = registry.start_run(model, f"{model}-20260131-181542-3f9c")
    source = str(files(registry_settings, model, "1"))
    made = [registry._client.create_model_version(model, source=source, run_id=run, tags={"intent": "i", FILES_TAG: "f"}) for _ in "ab"]
    found = registry.find_version(model, run_id=run, tags={"intent": "i"})

    assert found is not None
    assert (found.version, found.sha256) == (str(made[0].version), "f")
    assert registry.find_version(model, run_id=run, tags={"intent": "other"}) is None
    assert registry.find_version(model, run_id="elsewhere", tags={"intent": "i"}) is None


@pytest.mark.parametrize(
    ("address", "page"),
    [
        ("https://crew:hunter2@mlflow.example:8443/ml/", "https://mlflow.example:8443/ml/#/models/boat/versions/3"),
        ("http://localhost:5000", "http://localhost:5000/#/models/boat/versions/3"),
        ("sqlite:////home/mlflow.db", ""),
    ],
)
def test_a_version_has_a_page_where_a_server_shows_it(registry: Registry, monkeypatch: pytest.MonkeyPatch, address: str, page: str) -> None:
    """Its address never holds a password."""
    monkeypatch.setattr(registry, "tracking_uri", address)

    assert registry.page("boat", "3") == page
    assert registry.page("boat", "") == ""


def test_a_version_is_marked(registry: Registry, model: str) -> None:
    """Status and reason stand in its tags; its description stays."""
    registry.describe(model, "2", description="Promoted.", tags={"status": "promoted"})
    registry.mark(model, "2", "rolled_back", "worse than its fallback")
    page = registry.pages(model)[1]

    assert (page.version, page.status, page.description) == ("2", "rolled_back", "Promoted.")
    assert page.tags["status_reason"] == "worse than its fallback"


def test_files_are_digested_as_they_lie(registry: Registry, model: str, registry_settings: Settings) -> None:
    """Another byte is another digest; without files it is empty, and both are seen without loading anything."""
    before = registry.files(model, "2")
    assert before == files_sha256(f"models:/{model}/2", tracking_uri=registry.tracking_uri)
    assert before != registry.files(model, "1")
    weights = files(registry_settings, model, "2") / "weights"
    weights.write_text("x")
    assert registry.files(model, "2") not in ("", before)

    weights.unlink()
    assert registry.files(model, "2") == ""
    weights.parent.rmdir()
    assert registry.files(model, "2") == ""


def test_a_version_without_an_entry_is_a_store_error(registry: Registry, model: str) -> None:
    """A deleted version's files cannot be asked for."""
    registry._client.delete_model_version(model, "2")

    with pytest.raises(StoreError, match=f"models:/{model}/2"):
        registry.files(model, "2")
