"""Serving modules in and out of MLflow: exported as pt2, loaded from verified bytes, never unpickled. Runs in a warm process."""

import contextlib
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from validation.canonical import digest, sha256_hex
from validation.errors import EvidenceError, RecipeError, StoreError, shown_cause

if TYPE_CHECKING:
    from mlflow.pyfunc import PyFuncModel

FILES_TAG = "sha256.model_files"  # of a version: digest of every file of the model, verified before each load

_PICKLES = (".pkl", ".pickle", ".pth", ".pt", ".bin", ".joblib")
_PREDICT_BATCH = 8192  # rows of one call; bounds memory
_WARM_UP_CALLS = 5  # first calls allocate and choose kernels
_REWRITTEN = "registered_model_meta"  # MLflow adds this file when it downloads by version


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredVersion:
    """A version that stands in the registry; versions are text everywhere, "1", "2", ..."""

    model: str
    version: str
    run_id: str
    model_uri: str  # models:/<model>/<version>
    sha256: str  # of the model's files, FILES_TAG


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a registered model answered."""

    scores: npt.NDArray[np.float64]  # (N,) or (N, C), finite unless holes were allowed
    latency_ms: tuple[float, ...]  # wall clock of one-row calls, in order taken


def version_uri(model: str, version: str) -> str:
    """MLflow's address of a version."""
    return f"models:/{model}/{version}"


def log_model(
    *,
    name: str,
    run_id: str,
    artifact: str,
    builder: str,
    arguments: Mapping[str, Any],
    example: str,
    example_arguments: Mapping[str, Any],
    tags: Mapping[str, str] | None = None,
    tracking_uri: str = "",
) -> RegisteredVersion:
    """Export a serving module as pt2, log it to a run and register it as a version without any alias.

    Args: name: registered model; artifact: name of the logged model within the run; builder: "module:function" that returns the
    nn.Module for `arguments`; example: "module:function" that returns at least two rows of its inputs, (rows, ...);
    tags: of the version, there from its first moment: `Registry.find_version` finds by them what a killed process registered;
    tracking_uri: "" = MLFLOW_TRACKING_URI.
    Raises: RecipeError when the module cannot be exported, or its answer to a row depends on the batch around it.
    """
    import mlflow
    import mlflow.pytorch

    inputs = np.ascontiguousarray(_resolved(example)(**example_arguments))
    if inputs.ndim < 1 or len(inputs) < 2:
        raise RecipeError(
            f"{example} gave inputs of shape {inputs.shape}. An export needs two or more rows, or it fixes the batch size at one."
        )
    module = _resolved(builder)(**arguments).eval()
    if tracking_uri:
        mlflow.set_tracking_uri(tracking_uri)
    with _answering("open", run_id), mlflow.start_run(run_id=run_id):
        try:
            info = mlflow.pytorch.log_model(
                module, name=artifact, serialization_format="pt2", input_example=inputs, signature=_signature(inputs),
                pip_requirements=_requirements(),
            )  # fmt: skip
        except Exception as error:  # torch.export raises dozens of kinds
            if _is_away(error):
                raise
            raise RecipeError(
                f"the module of {builder} cannot be exported ({type(error).__name__}: {error}). A model that needs pickle to load is not "
                "registered. Make its forward traceable by torch.export: no branches on values, no Python side effects."
            ) from shown_cause(error)
        files_sha256 = _examined(info.model_uri, inputs, builder)
    with _answering("register a model of", run_id):
        made = mlflow.register_model(info.model_uri, name, tags={**(tags or {}), FILES_TAG: files_sha256})
    version = str(made.version)
    return RegisteredVersion(model=name, version=version, run_id=run_id, model_uri=version_uri(name, version), sha256=files_sha256)


def load_and_predict(
    model_uri: str, inputs: npt.NDArray[Any], *, latency_calls: int = 0, sha256: str = "", tracking_uri: str = "", holes: bool = False
) -> Prediction:
    """Load a registered model from verified bytes, without pickle, and ask it for scores of all rows of `inputs`, (N, ...).

    Args: sha256: of the model's files; "" = the digest that was tagged when the version was registered; holes: a row whose score is not
    finite is for the caller to count, as in service.
    Raises: EvidenceError when the files are not those that were registered, or the scores are not finite or not one a row.
    """
    import mlflow

    if tracking_uri:
        mlflow.set_tracking_uri(tracking_uri)
    with tempfile.TemporaryDirectory() as scratch:
        folder = _downloaded(model_uri, scratch)
        _demand_unaltered(model_uri, folder, sha256 or _tagged_digest(model_uri))
        model = _loaded(folder)
    rows = np.ascontiguousarray(inputs)
    scores = _scores(model, rows, model_uri, holes=holes)
    return Prediction(scores=scores, latency_ms=_latencies(model, rows, latency_calls))


def load_and_answer(model_uri: str, *, sha256: str, tracking_uri: str = "") -> int:
    """Load a registered model from files with this sha256 and ask it for scores of the example it was registered with; returns the rows.

    Needs nothing of the recipe, so that an old version can be tried when the recipe's code is broken or gone.
    Raises: EvidenceError when the files are others, hold no example, or the scores are not finite or not one a row.
    """
    import mlflow

    if tracking_uri:
        mlflow.set_tracking_uri(tracking_uri)
    with tempfile.TemporaryDirectory() as scratch:
        folder = _downloaded(model_uri, scratch)
        _demand_unaltered(model_uri, folder, sha256)
        model = _loaded(folder)
        example = model.input_example
    if example is None:
        raise EvidenceError(f"{model_uri} was registered without an example of its inputs, so it cannot be tried. Serve another version.")
    return len(_scores(model, np.ascontiguousarray(example), model_uri))


def files_sha256(model_uri: str, *, tracking_uri: str = "") -> str:
    """Digest of a registered model's files as they lie there now, never loaded; "" when there are none.

    Raises: StoreError when they cannot be read: whether they are still there is not known then.
    """
    import mlflow
    from mlflow.artifacts import list_artifacts
    from mlflow.exceptions import MlflowException

    if tracking_uri:
        mlflow.set_tracking_uri(tracking_uri)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = _downloaded(model_uri, scratch)
        except StoreError:
            with contextlib.suppress(MlflowException, OSError):
                if not list_artifacts(artifact_uri=model_uri):
                    return ""
            raise
        held = any(path.is_file() and path.name != _REWRITTEN for path in folder.rglob("*"))
        return _digest_of(folder) if held else ""


@contextlib.contextmanager
def _answering(what: str, run_id: str) -> Iterator[None]:
    """Tell a server that is away, or refuses, from a model that cannot be exported. Raises StoreError for the first."""
    try:
        yield
    except Exception as error:
        if not _is_away(error):
            raise
        raise StoreError(
            f"MLflow could not {what} run {run_id} ({error}). That says nothing about the model. Check SEATRIAL_MLFLOW_TRACKING_URI and "
            "that the server answers, then run `seatrial finish ID`: every step may be repeated."
        ) from shown_cause(error)


def _is_away(error: Exception) -> bool:
    """Whether a server, its database or its artifact store did not do what was asked."""
    from botocore.exceptions import BotoCoreError, ClientError
    from mlflow.exceptions import MlflowException, RestException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    if isinstance(error, RestException | RequestException | SQLAlchemyError | BotoCoreError | ClientError):
        return True
    return isinstance(error, MlflowException) and "API request to" in str(error)  # how MLflow tells of a connection that failed


def _resolved(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _signature(inputs: npt.NDArray[Any]) -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    return ModelSignature(inputs=Schema([TensorSpec(inputs.dtype, (-1, *inputs.shape[1:]))]))


def _requirements() -> list[str]:
    # given explicitly: inferring them starts another process and takes 12 s; a local build tag (+cpu) is not on any index
    return [f"{name}=={installed_version(name).partition('+')[0]}" for name in ("torch", "numpy")]


def _examined(model_uri: str, inputs: npt.NDArray[Any], builder: str) -> str:
    """Digest of a logged model's files, after seeing that they load without pickle and serve any batch size."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = _downloaded(model_uri, scratch)
        if pickles := [path.name for path in folder.rglob("*") if path.suffix in _PICKLES]:
            raise RecipeError(f"the export of {builder} contains {', '.join(pickles)}: loading these can run code. It was not registered.")
        files_sha256 = _digest_of(folder)
        model = _loaded(folder)
    whole = _scores(model, inputs, builder)
    alone = np.concatenate([_scores(model, inputs[at : at + 1], builder) for at in range(len(inputs))])
    if alone.shape != whole.shape or not np.allclose(alone, whole, rtol=1e-4, atol=1e-6):
        raise RecipeError(
            f"the serving module of {builder} scores a row alone as {alone[:2].tolist()} and in a batch as {whole[:2].tolist()}. It cannot "
            "serve single requests, so it was not registered. Remove what mixes rows: batch statistics, sorting, a fixed batch size."
        )
    return files_sha256


def _downloaded(model_uri: str, scratch: str) -> Path:
    # always a copy: MLflow writes into the folder it hands out, which would be the registry's own for a local artifact root
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    try:
        return Path(download_artifacts(artifact_uri=model_uri, dst_path=scratch))
    except (MlflowException, OSError) as error:
        raise StoreError(
            f"model {model_uri} cannot be fetched ({error}). It cannot serve from here. Check that the version exists and that its "
            "artifacts were not removed; `seatrial show` names the versions in use."
        ) from shown_cause(error)


def _digest_of(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _REWRITTEN)
    return digest({path.relative_to(folder).as_posix(): sha256_hex(path.read_bytes()) for path in files})


def _tagged_digest(model_uri: str) -> str:
    from mlflow import MlflowClient

    parts = model_uri.removeprefix("models:/").split("/")
    if len(parts) != 2:
        return ""
    return str(MlflowClient().get_model_version(*parts).tags.get(FILES_TAG, ""))


def _demand_unaltered(model_uri: str, folder: Path, expected: str) -> None:
    actual = _digest_of(folder)
    if actual != expected:
        raise EvidenceError(
            f"the files of {model_uri} have sha256 {actual}, registered was {expected or 'none'}. This is not the model that was judged, "
            "so it was not loaded. Restore its artifacts from a backup, or serve another version with `seatrial rollback`."
        )


def _loaded(folder: Path) -> "PyFuncModel":
    from mlflow import pyfunc

    with _pickle_refused():
        # else MLflow looks through every installed package, for a second, and warns of versions; here the answer itself is the proof
        model: PyFuncModel = pyfunc.load_model(str(folder), suppress_warnings=True)
    return model


@contextlib.contextmanager
def _pickle_refused() -> Iterator[None]:
    name = "MLFLOW_ALLOW_PICKLE_DESERIALIZATION"
    before = os.environ.get(name)
    os.environ[name] = "false"  # MLflow then checks every record of the pt2 archive before torch reads it
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _scores(model: "PyFuncModel", rows: npt.NDArray[Any], whose: str, *, holes: bool = False) -> npt.NDArray[np.float64]:
    parts = [np.asarray(model.predict(rows[at : at + _PREDICT_BATCH]), dtype=np.float64) for at in range(0, len(rows), _PREDICT_BATCH)]
    scores = np.concatenate(parts) if parts else np.empty(0)
    if not len(rows) or scores.ndim not in (1, 2) or len(scores) != len(rows) or not (holes or np.isfinite(scores).all()):
        bad = int((~np.isfinite(scores)).sum())
        raise EvidenceError(
            f"{whose} answered {len(rows)} rows with scores of shape {scores.shape}, {bad} of them not finite. Such answers cannot be "
            "judged or served. Look at the model's forward on these inputs."
        )
    return scores


def _latencies(model: "PyFuncModel", rows: npt.NDArray[Any], calls: int) -> tuple[float, ...]:
    taken = []
    for number in range(-_WARM_UP_CALLS if calls else 0, calls):
        row = rows[number % len(rows)][None]
        start = time.perf_counter_ns()
        model.predict(row)
        taken.append((time.perf_counter_ns() - start) / 1e6)
    return tuple(taken[-calls:]) if calls else ()
