import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers_models
import numpy as np
import pytest
import torch

from infra.pointer import Pointer
from infra.registry import FILES_TAG, RegisteredVersion, Registry, load_and_predict, log_model, version_uri
from infra.settings import Settings, embedded_environment, load_settings
from validation.errors import ConfigError, EvidenceError, RecipeError, StoreError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # MLflow's and torch.export's own

POINTER = Pointer(
    model="trial", serving_version="2", serving_kind="candidate", last_known_good="1", baseline="1",
    release_id="trial-20260131-181542-3f9c", sequence=2,
)  # fmt: skip


def register(
    registry: Registry, run_id: str, builder: str = "scorer", *, name: str = "trial", rows: int = 2, **arguments: Any
) -> RegisteredVersion:
    """Log a module of helpers_models and register it."""
    return log_model(
        name=name, run_id=run_id, artifact=builder, builder=f"helpers_models:{builder}", arguments=arguments, example="helpers_models:rows",
        example_arguments={"count": rows}, tracking_uri=registry.tracking_uri,
    )  # fmt: skip


@pytest.fixture(scope="module")
def two(registry: Registry) -> tuple[RegisteredVersion, RegisteredVersion]:
    """Two versions of the model "trial", logged to one run."""
    run_id = registry.start_run("trial", "trial-20260131-181542-3f9c")
    return register(registry, run_id, shift=0.0), register(registry, run_id, shift=1.0)


def test_versions_are_numbered_text(registry: Registry, two: tuple[RegisteredVersion, RegisteredVersion]) -> None:
    """Each registration is a version of its own, and reads back as it was registered."""
    assert [item.version for item in two] == ["1", "2"]
    assert registry.versions("trial") == two
    assert registry.version("trial", "2") == two[1]
    assert two[0].sha256 != two[1].sha256


def test_nothing_in_the_artifacts_is_a_pickle(registry_settings: Settings, two: object) -> None:
    """The artifact root, under a path with a space, holds pt2 archives and no pickled file."""
    files = [path for path in (registry_settings.home / "mlartifacts").rglob("*") if path.is_file()]

    assert len([path for path in files if path.suffix == ".pt2"]) >= 2
    assert [path.name for path in files if path.suffix in (".pkl", ".pickle", ".pth", ".pt", ".bin")] == []
    assert [path.name for path in files if path.name == "registered_model_meta"] == []


@pytest.mark.parametrize("count", [1, 2, 5, 9000])
def test_a_version_answers_any_batch(registry: Registry, two: tuple[RegisteredVersion, RegisteredVersion], count: int) -> None:
    """The loaded version scores batches of any size as the module it came from, dropout off."""
    inputs = helpers_models.rows(count)
    found = load_and_predict(two[1].model_uri, inputs, tracking_uri=registry.tracking_uri)
    with torch.no_grad():
        expected = helpers_models.scorer(1.0).eval()(torch.from_numpy(inputs)).double().numpy()

    assert found.scores.dtype == np.float64
    np.testing.assert_allclose(found.scores, expected, rtol=1e-5)
    assert found.latency_ms == ()


def test_latency_is_of_single_rows(registry: Registry, two: tuple[RegisteredVersion, RegisteredVersion]) -> None:
    """As many one-row calls are timed as were asked for."""
    found = load_and_predict(two[0].model_uri, helpers_models.rows(3), latency_calls=7, tracking_uri=registry.tracking_uri)

    assert len(found.latency_ms) == 7
    assert min(found.latency_ms) > 0


def test_altered_files_are_not_loaded(registry: Registry, registry_settings: Settings) -> None:
    """One changed byte in a version's archive and it is refused, before anything in it is read."""
    made = register(registry, registry.start_run("altered", "altered-20260131-181542-3f9c"), name="altered")
    archive = max((registry_settings.home / "mlartifacts").rglob("*.pt2"), key=lambda path: path.stat().st_mtime_ns)
    body = bytearray(archive.read_bytes())
    body[len(body) // 2] ^= 1
    archive.write_bytes(body)

    with pytest.raises(EvidenceError, match=r"not the model that was judged.*seatrial rollback"):
        load_and_predict(made.model_uri, helpers_models.rows(), tracking_uri=registry.tracking_uri)


def test_a_missing_version_is_a_store_error(registry: Registry, two: object) -> None:
    """Loading or finding a version that is not there names it."""
    with pytest.raises(StoreError, match="models:/trial/99"):
        load_and_predict(version_uri("trial", "99"), helpers_models.rows(), tracking_uri=registry.tracking_uri)
    with pytest.raises(StoreError, match="trial version 99"):
        registry.version("trial", "99")


@pytest.mark.parametrize(
    ("builder", "rows", "named"),
    [
        pytest.param("centred", 2, "a row alone as", id="batch-dependent"),
        pytest.param("branching", 2, "cannot be exported", id="untraceable"),
        pytest.param("scorer", 1, "two or more rows", id="one-row-example"),
    ],
)
def test_what_cannot_serve_is_not_registered(registry: Registry, builder: str, rows: int, named: str) -> None:
    """A module that cannot be exported, or whose scores depend on the batch, gets no version."""
    run_id = registry.start_run("unfit", "unfit-20260131-181542-3f9c")

    with pytest.raises(RecipeError, match=named):
        register(registry, run_id, builder, name="unfit", rows=rows)
    assert registry.versions("unfit") == ()


def test_scores_that_are_not_finite_are_refused(registry: Registry) -> None:
    """A model that answers with infinities cannot be judged."""
    made = register(registry, registry.start_run("infinite", "infinite-20260131-181542-3f9c"), "not_finite", name="infinite")

    with pytest.raises(EvidenceError, match="1 of them not finite"):
        load_and_predict(made.model_uri, np.array([[1, 1, 1], [0, 0, 0]], np.float32), tracking_uri=registry.tracking_uri)


def test_aliases_follow_the_pointer(registry: Registry, two: object) -> None:
    """mirror() sets, moves and removes aliases until they say what the pointer says, and then changes nothing."""
    assert registry.mirror(POINTER) == ("champion", "last-known-good", "baseline")
    assert registry.mirror(POINTER) == ()
    assert registry.aliases("trial") == {"champion": "2", "last-known-good": "1", "baseline": "1"}

    assert registry.mirror(replace(POINTER, serving_version="1", last_known_good="")) == ("champion", "last-known-good")

    assert registry.aliases("trial") == {"champion": "1", "baseline": "1"}
    assert registry.by_alias("trial", "champion") == registry.version("trial", "1")
    assert registry.by_alias("trial", "last-known-good") is None


def test_an_unknown_model_has_no_aliases(registry: Registry) -> None:
    """Asking for the aliases of a model that was never registered is no error."""
    assert registry.aliases("never-seen") == {}


def test_a_version_says_why(registry: Registry, two: tuple[RegisteredVersion, RegisteredVersion]) -> None:
    """Description and tags stand on the version; tags of registration stay."""
    text = "Refused: scaling failed.\n\n| gate | outcome |\n|---|---|\n| scaling | fail |\n"
    registry.describe("trial", "2", description=text, tags={"status": "refused", "gate.scaling": "fail"})
    found = registry._client.get_model_version("trial", "2")

    assert found.description == text
    assert found.tags == {"status": "refused", "gate.scaling": "fail", FILES_TAG: two[1].sha256}


@pytest.mark.parametrize("text", ["", "# Title", "| a |", "![p](x.png)", "Fine.\n![p](data:image/png;base64,xx)"])
def test_a_description_begins_with_a_sentence(registry: Registry, text: str) -> None:
    """What MLflow would show badly is refused where it is written."""
    with pytest.raises(ValueError, match="plain sentence"):
        registry.describe("trial", "1", description=text, tags={})


def test_a_long_description_is_cut_at_a_line(registry: Registry, two: object) -> None:
    """A description longer than MLflow's column ends at a whole line and says where the rest is."""
    registry.describe("trial", "1", description="Promoted.\n" + "| a row |\n" * 1000, tags={})
    found = registry._client.get_model_version("trial", "1").description

    assert len(found) <= 5000
    assert found.endswith("| a row |\n\nCut here: the whole text is in report.html among the run's artifacts.")


def test_the_baseline_is_described(registry: Registry, two: object) -> None:
    """The model's page says what it predicts, the baseline's what it is for."""
    registry.describe_baseline("trial", "1", "Will it be late?")

    assert registry._client.get_registered_model("trial").description == "Will it be late?"
    assert registry._client.get_model_version("trial", "1").tags["status"] == "baseline"


def test_a_release_has_one_run(registry: Registry, tmp_path: Path) -> None:
    """A release that is continued goes on in its run; report, plots, evidence and metrics lie where links expect them."""
    run_id = registry.start_run("pages", "pages-20260131-181542-3f9c")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "scaling-0.png").write_bytes(b"png")
    (tmp_path / "report.html").write_text("<p>report</p>")
    for _ in range(2):
        registry.log(run_id, params={"world_sizes": (1, 2)})
        registry.publish(
            run_id,
            page=tmp_path / "report.html",
            plots=tmp_path / "plots",
            evidence={"scaling": b"{}"},
            metrics={"s": 1.5},
            tags={"sha256.code": "c"},
        )
    registry.finish_run(run_id, ok=True)

    assert registry.start_run("pages", "pages-20260131-181542-3f9c") == run_id
    places = [item.path for folder in ("", "plots", "evidence") for item in registry._client.list_artifacts(run_id, folder)]
    assert sorted(places) == ["evidence", "evidence/scaling.json", "plots", "plots/scaling-0.png", "report.html"]
    run = registry._client.get_run(run_id)
    assert run.data.tags["sha256.code"] == "c"
    assert (run.data.metrics, run.data.params, run.info.status) == ({"s": 1.5}, {"world_sizes": "(1, 2)"}, "FINISHED")


def test_an_unwritable_home_is_a_bad_setting(tmp_path: Path) -> None:
    """A registry under a path that cannot be made is a ConfigError that names the variable."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="SEATRIAL_HOME"):
        Registry(load_settings(home=tmp_path / "file" / "home"))


TORCHLESS = """
import sys
from pathlib import Path
from infra.registry import Registry
from infra.settings import load_settings

home = Path(sys.argv[1])
registry = Registry(load_settings(home=home))
run_id = registry.start_run("torchless", "torchless-20260131-181542-3f9c")
registry.log(run_id, params={"a": 1}, metrics={"m": 1.0})
registry.publish(run_id, page=home / "report.html", plots=home / "nowhere", evidence={"e": b"{}"}, metrics={}, tags={})
registry.describe("trial", "1", description="Fine.", tags={"status": "promoted"})
registry.by_alias("trial", "champion"), registry.versions("trial"), registry.finish_run(run_id, ok=True)
print("torch" in sys.modules)
"""


def test_the_flow_process_never_loads_torch(registry: Registry, registry_settings: Settings, two: object) -> None:
    """Everything that `Registry` does, it does without importing torch; nothing but the answer is printed."""
    home = registry_settings.home
    (home / "report.html").write_text("")
    done = subprocess.run([sys.executable, "-c", TORCHLESS, str(home)], capture_output=True, text=True, timeout=120, check=False)

    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_models_may_lie_in_s3(registry_settings: Settings, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an S3 artifact root a version is logged, verified and loaded through the bucket."""
    settings = load_settings(
        home=registry_settings.home, experiment="in-s3", mlflow_artifacts="s3://trial/models", store_endpoint=s3, store_region="us-east-1"
    )
    for name, value in embedded_environment(settings, {}).items():
        monkeypatch.setenv(name, value)
    registry = Registry(settings)
    made = register(registry, registry.start_run("in-s3", "in-s3-20260131-181542-3f9c"), name="in-s3")

    assert load_and_predict(made.model_uri, helpers_models.rows(3)).scores.shape == (3,)
