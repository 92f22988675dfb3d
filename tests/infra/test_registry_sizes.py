"""What a release keeps in the registry is counted from MLflow's own listing, and a registry that cannot answer is said so."""

from pathlib import Path

import pytest

from infra.registry import Registry
from infra.registry_sizes import registry_bytes
from infra.settings import Settings, load_settings
from validation.errors import StoreError


@pytest.fixture(scope="module")
def run_id(registry: Registry, registry_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run with files of 5 + 70 bytes in two folders, and version 1 of a model with one of 900."""
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("files")
    for name, size in (("report.html", 5), ("plot.png", 70), ("weights", 900)):
        (folder / name).write_bytes(b"x" * size)
    client = MlflowClient(tracking_uri=registry_settings.mlflow_tracking_uri, registry_uri=registry_settings.mlflow_tracking_uri)
    run = registry.start_run("sized", "sized-20260101-000000-aaaa")
    client.log_artifact(run, str(folder / "report.html"))
    client.log_artifact(run, str(folder / "plot.png"), "plots")
    model = client.create_logged_model(registry.experiment_id, name="sized", source_run_id=run)
    client.log_model_artifact(model.model_id, str(folder / "weights"))
    client.create_registered_model("sized")
    with pytest.MonkeyPatch.context() as patch:  # MLflow looks the logged model up where the process points to
        patch.setenv("MLFLOW_TRACKING_URI", registry_settings.mlflow_tracking_uri)
        client.create_model_version("sized", f"models:/{model.model_id}", run_id=run)
    return str(run)


def test_bytes_are_those_of_the_run_and_of_the_model(registry_settings: Settings, run_id: str) -> None:
    """Files in folders count too."""
    assert registry_bytes(registry_settings, model="sized", version="1", run_id=run_id) == 975


@pytest.mark.parametrize(("version", "run"), [("9", ""), ("1", "0" * 32)], ids=["no version", "no run"])
def test_what_the_registry_no_longer_has_is_an_error(registry_settings: Settings, run_id: str, version: str, run: str) -> None:
    """A deleted version has no size; zero would be a lie."""
    with pytest.raises(StoreError, match="SEATRIAL_MLFLOW_TRACKING_URI"):
        registry_bytes(registry_settings, model="sized", version=version, run_id=run or run_id)


def test_a_registry_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """Counting files makes no database."""
    settings = load_settings(home=tmp_path / "home")

    with pytest.raises(StoreError, match="there is no registry"):
        registry_bytes(settings, model="boat", version="1", run_id="r")
    assert not settings.home.exists()
