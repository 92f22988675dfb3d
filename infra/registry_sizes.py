"""How many bytes a release keeps in the registry: its run's files and the model's. Only lists; makes and changes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from infra.settings import RegistrySettings
from validation.errors import StoreError, shown_cause

if TYPE_CHECKING:
    from mlflow.entities import FileInfo

_SQLITE = "sqlite:///"
_SOURCE = "models:/"  # of a version whose files belong to a logged model


def registry_bytes(settings: RegistrySettings, *, model: str, version: str, run_id: str) -> int:
    """Bytes of report, plots and evidence of the run, and of the version's own files.

    Raises: StoreError when the registry does not answer, or no longer has the run or the version.
    """
    database = settings.mlflow_tracking_uri.removeprefix(_SQLITE)
    if database != settings.mlflow_tracking_uri and not Path(database).exists():
        raise StoreError(f"there is no registry at {database}. Its files cannot be counted. Check SEATRIAL_MLFLOW_TRACKING_URI.")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        client = MlflowClient(tracking_uri=settings.mlflow_tracking_uri, registry_uri=settings.mlflow_tracking_uri)
        source = str(client.get_model_version(model, version).source or "")
        size = _bytes_below(lambda path: client.list_artifacts(run_id, path))
        if source.startswith(_SOURCE):
            model_id = source.removeprefix(_SOURCE)
            size += _bytes_below(lambda path: client.list_logged_model_artifacts(model_id, path))
    except (MlflowException, OSError) as error:
        raise StoreError(
            f"the registry cannot say how large version {version} of {model} is ({error}). Its storage stays out of the sum. See that "
            "SEATRIAL_MLFLOW_TRACKING_URI answers, then run the command again."
        ) from shown_cause(error)
    return size


def _bytes_below(files: "Callable[[str | None], list[FileInfo]]", path: str | None = None) -> int:
    return sum(_bytes_below(files, item.path) if item.is_dir else int(item.file_size or 0) for item in files(path))
