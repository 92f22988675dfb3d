from pathlib import Path

import pytest

from infra.settings import embedded_environment, load_settings
from validation.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "CACHE", "STORE", "STORE_ENDPOINT", "MLFLOW_TRACKING_URI", "EXPERIMENT"):
        monkeypatch.delenv(f"SEATRIAL_{name}", raising=False)


def test_everything_lies_under_home(tmp_path: Path) -> None:
    """Without other settings, store, cache, registry and artifacts are below the home folder."""
    settings = load_settings(home=tmp_path / "my home")

    assert settings.store == str(tmp_path / "my home" / "store")
    assert settings.cache == tmp_path / "my home" / "cache"
    assert settings.mlflow_tracking_uri == f"sqlite:///{tmp_path}/my home/mlflow.db"
    assert settings.mlflow_artifacts.endswith("/my%20home/mlartifacts")


def test_paths_are_absolute_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is resolved when settings are read, so that a later change of folder does not move the store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEATRIAL_STORE", "kept/here")

    settings = load_settings()

    assert settings.home == tmp_path / ".seatrial"
    assert settings.store == str(tmp_path / "kept" / "here")


def test_variables_are_read_and_arguments_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value given in code goes before a SEATRIAL_* variable, which goes before the default."""
    monkeypatch.setenv("SEATRIAL_EXPERIMENT", "from-env")
    monkeypatch.setenv("SEATRIAL_STORE", "s3://bucket/some/prefix/")

    assert load_settings(home=tmp_path).experiment == "from-env"
    assert load_settings(home=tmp_path, experiment="given").experiment == "given"
    assert load_settings(home=tmp_path).store == "s3://bucket/some/prefix"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        pytest.param({"store": "gs://bucket"}, "neither a folder nor an s3", id="unknown-scheme"),
        pytest.param({"store": "s3:///"}, "names no bucket", id="no-bucket"),
        pytest.param({"store_endpoint": "localhost:9000"}, "SEATRIAL_STORE_ENDPOINT", id="endpoint-without-scheme"),
        pytest.param({"store_attempts": 0}, "SEATRIAL_STORE_ATTEMPTS", id="no-attempt"),
        pytest.param({"store_read_timeout_s": float("nan")}, "SEATRIAL_STORE_READ_TIMEOUT_S", id="nan"),
        pytest.param({"experiment": ""}, "SEATRIAL_EXPERIMENT", id="empty-experiment"),
        pytest.param({"home": "/tmp/what?"}, "choose another folder", id="question-mark-in-sqlite-path"),
        pytest.param({"stroe": "x"}, "SEATRIAL_STROE", id="misspelt"),
    ],
)
def test_bad_values_are_named(given: dict[str, object], named: str) -> None:
    """A value that cannot work is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=named):
        load_settings(**given)


def test_settings_are_frozen(tmp_path: Path) -> None:
    """Settings do not change after they are read."""
    settings = load_settings(home=tmp_path)

    with pytest.raises(ValueError, match="frozen"):
        settings.home = Path("/elsewhere")  # type: ignore[misc]


def test_the_environment_silences_and_gathers(tmp_path: Path) -> None:
    """Telemetry is off and Prefect and MLflow keep their state under home."""
    found = embedded_environment(load_settings(home=tmp_path / "a b"), {})

    assert found["PREFECT_HOME"] == f"{tmp_path}/a b/prefect"
    assert found["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/a b/mlflow.db"
    assert (found["DO_NOT_TRACK"], found["GX_ANALYTICS_ENABLED"], found["MLFLOW_DISABLE_TELEMETRY"]) == ("1", "false", "true")
    assert found["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"


def test_the_users_own_variables_stay(tmp_path: Path) -> None:
    """A variable that is set already is not in the answer; the places of Sea Trial always are."""
    found = embedded_environment(load_settings(home=tmp_path), {"PREFECT_HOME": "/mine", "SEATRIAL_HOME": ".seatrial"})

    assert "PREFECT_HOME" not in found
    assert found["SEATRIAL_HOME"] == str(tmp_path)


def test_artifacts_in_s3_use_the_stores_endpoint(tmp_path: Path) -> None:
    """MLflow learns the endpoint when its artifacts are in S3, and only then."""
    inside = load_settings(home=tmp_path, mlflow_artifacts="s3://bucket/models", store_endpoint="http://127.0.0.1:9000")
    outside = load_settings(home=tmp_path, store_endpoint="http://127.0.0.1:9000")

    assert embedded_environment(inside, {})["MLFLOW_S3_ENDPOINT_URL"] == "http://127.0.0.1:9000"
    assert "MLFLOW_S3_ENDPOINT_URL" not in embedded_environment(outside, {})
