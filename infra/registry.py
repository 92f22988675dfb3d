"""MLflow: versions of a model, what each was let through or refused for, and the aliases that mirror the serving pointer.

`Registry` runs in the flow process, which never loads torch; `log_model` and `load_and_predict` (infra/export.py) in a warm process.
MLflow's aliases have no compare-and-set, so they are a view: the pointer (infra/pointer.py) decides, `mirror` repairs the view.
"""

import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit, urlunsplit

from infra.export import FILES_TAG as FILES_TAG
from infra.export import Prediction as Prediction
from infra.export import RegisteredVersion as RegisteredVersion
from infra.export import files_sha256
from infra.export import load_and_predict as load_and_predict
from infra.export import log_model as log_model
from infra.export import version_uri as version_uri
from infra.pointer import Pointer, read_pointer
from infra.settings import RegistrySettings
from infra.store import ObjectStore
from validation.errors import ConfigError, ConflictError, StoreError, shown_cause

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel
    from mlflow.exceptions import MlflowException

ALIASES = ("champion", "last-known-good", "baseline")
STATUS_TAG, REASON_TAG = "status", "status_reason"  # of a version: promoted, refused, baseline, rolled_back or abandoned, and why
MIRROR_TAG = "sea_trial.aliases"  # of a model: what `mirror` last set, so that an alias that lags is told from one moved by hand

_SETTLE_TRIES = 5  # each lost one means that somebody else moved an alias between our writing and our reading
_WRITE_TRIES = 5  # of one tag or alias: two that write the same one at once make MLflow's database refuse the second
_RACED = ("BAD_REQUEST", "TEMPORARILY_UNAVAILABLE")  # MLflow's words for a constraint that was broken and for a database that was locked
_DESCRIPTION_LIMIT = 5000  # characters; the column's width in MLflow's own schema, enforced by PostgreSQL


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPage:
    """A version as its page shows it."""

    version: str
    run_id: str
    status: str  # STATUS_TAG; "" = nothing was said of it
    description: str
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """What `mirror` last wrote, or was about to write when its process died."""

    sequence: int  # of the pointer; 0 = never
    after: Mapping[str, str]  # alias -> version, as the pointer had it
    before: Mapping[str, str]  # what stood there; empty once every alias was read back


class Registry:
    """Runs, versions, descriptions and aliases. Every method may be called again with the same values."""

    def __init__(self, settings: RegistrySettings) -> None:
        """Connect, and make the experiment with its artifact root if it is not there.

        Raises: ConfigError when the home folder cannot be written; StoreError when MLflow cannot be reached or refuses.
        """
        from mlflow import MlflowClient

        if settings.mlflow_tracking_uri.startswith("sqlite:"):
            _make_folder(settings.home)
        self.tracking_uri = settings.mlflow_tracking_uri
        with _explained(f"open {self.tracking_uri}"):
            self._client = MlflowClient(tracking_uri=self.tracking_uri, registry_uri=self.tracking_uri)
            self.experiment_id = self._ensure_experiment(settings.experiment, settings.mlflow_artifacts)

    def start_run(self, model: str, release_id: str) -> str:
        """The run of a release of a model: the one it has already, or a new one; returns its id."""
        with _explained(f"start the run of {release_id}"):
            found = self._client.search_runs([self.experiment_id], f"tags.release_id = '{release_id}'", max_results=1)
            if found:
                return str(found[0].info.run_id)
            made = self._client.create_run(self.experiment_id, run_name=release_id, tags={"release_id": release_id, "model": model})
            return str(made.info.run_id)

    def log(self, run_id: str, *, params: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """Log parameters (never changed afterwards) and metrics to a run."""
        from mlflow.entities import Metric, Param

        now_ms = int(time.time() * 1000)
        with _explained(f"log to run {run_id}"):
            self._client.log_batch(
                run_id,
                params=[Param(name, str(value)) for name, value in (params or {}).items()],
                metrics=[Metric(name, float(value), now_ms, 0) for name, value in (metrics or {}).items()],
            )

    def publish(
        self, run_id: str, *, page: Path, plots: Path, evidence: Mapping[str, bytes], metrics: Mapping[str, float], tags: Mapping[str, str]
    ) -> None:
        """Put report.html, plots/*.png and evidence/<name>.json beside the model; links in descriptions rest on these paths.

        The tag "mlflow.note.content" is the text on the run's page; tags, unlike parameters, may change when a gate is held again.
        """
        with _explained(f"publish to run {run_id}"), tempfile.TemporaryDirectory() as scratch:
            for name, body in evidence.items():
                (Path(scratch) / f"{name}.json").write_bytes(body)
            self._client.log_artifact(run_id, str(page))
            self._client.log_artifacts(run_id, scratch, "evidence")
            if plots.is_dir():
                self._client.log_artifacts(run_id, str(plots), "plots")
            for name, value in tags.items():
                _written(self._client.set_tag, run_id, name, value)
        self.log(run_id, metrics=metrics)

    def finish_run(self, run_id: str, *, ok: bool) -> None:
        """Close a run as finished or failed."""
        with _explained(f"close run {run_id}"):
            self._client.set_terminated(run_id, "FINISHED" if ok else "FAILED")

    def describe(self, model: str, version: str, *, description: str, tags: Mapping[str, str]) -> None:
        """Set a version's page (markdown) and tags.

        The list of versions shows the description's first line raw, so it has to be a plain sentence; data-URI images are dropped by
        MLflow, plots are shown as `![title](get-artifact?path=plots/<name>.png&run_uuid=<run>)`.
        """
        if description[:1] in ("", "#", "|", "!", "[", "*", "-", ">", "`", "\n", " ") or "](data:" in description:
            raise ValueError(f"a description has to begin with a plain sentence and hold no data-URI image, got {description[:60]!r}")
        with _explained(f"describe {model} version {version}"):
            self._client.update_model_version(model, version, description=_fitting(description))
            for name, value in tags.items():
                _written(self._client.set_model_version_tag, model, version, name, str(value))

    def describe_baseline(self, model: str, version: str, question: str) -> None:
        """Say on the model's page what it predicts, and on the baseline version's what it is for."""
        with _explained(f"describe {model}"):
            self._client.update_registered_model(model, description=question)
        text = f"Baseline: the simple model that serves while no verified candidate can. {question}"
        self.describe(model, version, description=text, tags={"status": "baseline"})

    def aliases(self, model: str) -> dict[str, str]:
        """Alias -> version, of ALIASES only; empty when the model is not registered."""
        found = self.all_aliases(model)
        return {alias: found[alias] for alias in ALIASES if alias in found}

    def all_aliases(self, model: str) -> dict[str, str]:
        """Alias -> version, those that people made included; empty when the model is not registered."""
        with _explained(f"read the aliases of {model}"):
            found = self._model(model)
            return {} if found is None else {alias: str(version) for alias, version in found.aliases.items()}

    def mirrored(self, model: str) -> Mirrored:
        """What `mirror` last made of the aliases."""
        with _explained(f"read the tags of {model}"):
            return _mirrored(self._model(model))

    def mirror(self, pointer: Pointer) -> tuple[str, ...]:
        """Make the aliases say what the pointer says, read back; returns the aliases that had to be changed.

        A version that is not registered any more gets no alias: `seatrial reconcile` says so and mends the pointer.
        Raises: StoreError when there is no such model; ConflictError when somebody else keeps moving them.
        """
        wanted, changed = pointer_aliases(pointer), set[str]()
        for _ in range(_SETTLE_TRIES):
            with _explained(f"set the aliases of {pointer.model}"):
                found = self._client.get_registered_model(pointer.model)
                present = {alias: str(version) for alias, version in found.aliases.items() if alias in ALIASES}
                wrong = [alias for alias in ALIASES if wanted.get(alias) != present.get(alias)]
                self._note(found, Mirrored(sequence=pointer.sequence, after=wanted, before=present if wrong else {}))
                for alias in wrong:
                    if not self._point(pointer.model, alias, wanted.get(alias, "")):
                        del wanted[alias]
            if not wrong:
                return tuple(alias for alias in ALIASES if alias in changed)
            changed |= {alias for alias in wrong if wanted.get(alias) != present.get(alias)}
        raise ConflictError(
            f"the aliases of {pointer.model} did not stay as they were set, {_SETTLE_TRIES} times. Somebody else moves them in the "
            "registry. What serves is the pointer, which is not touched by that. Let them end, then run `seatrial reconcile`."
        )

    def by_alias(self, model: str, alias: str) -> RegisteredVersion | None:
        """The version an alias names, or None."""
        version = self.aliases(model).get(alias)
        return None if version is None else self.version(model, version)

    def version(self, model: str, version: str) -> RegisteredVersion:
        """A version as registered. Raises StoreError when there is none."""
        with _explained(f"find {model} version {version}"):
            return _registered(self._client.get_model_version(model, version))

    def versions(self, model: str) -> tuple[RegisteredVersion, ...]:
        """Every version of a model, oldest first."""
        with _explained(f"list the versions of {model}"):
            found = list(self._client.search_model_versions(f"name = '{model}'"))
        return tuple(_registered(item) for item in sorted(found, key=lambda item: int(item.version)))

    def pages(self, model: str) -> tuple[VersionPage, ...]:
        """Every version that was not deleted, with its status and description, oldest first."""
        with _explained(f"list the versions of {model}"):
            found = sorted(self._client.search_model_versions(f"name = '{model}'"), key=lambda item: int(item.version))
        return tuple(
            VersionPage(
                version=str(item.version), run_id=item.run_id or "", status=item.tags.get(STATUS_TAG, ""),
                description=item.description or "", tags=dict(item.tags),
            )
            for item in found
        )  # fmt: skip

    def page(self, model: str, version: str) -> str:
        """The address of a version's page, without user and password; "" when there is no server that shows one, or no version."""
        address = urlsplit(self.tracking_uri)
        if address.scheme not in ("http", "https") or not version:
            return ""
        place = urlunsplit((address.scheme, address.netloc.rpartition("@")[2], address.path.rstrip("/"), "", ""))
        return f"{place}/#/models/{quote(model, safe='')}/versions/{quote(version, safe='')}"

    def find_version(self, model: str, *, run_id: str, tags: Mapping[str, str]) -> RegisteredVersion | None:
        """The version that a run registered with these tags (infra/export.py: log_model), or None.

        A process that was killed after it registered left the version behind: found again, it is not registered twice. Of several the
        oldest, which every process that looks finds.
        """
        for page in self.pages(model):
            if page.run_id == run_id and all(page.tags.get(name) == value for name, value in tags.items()):
                return self.version(model, page.version)
        return None

    def mark(self, model: str, version: str, status: str, reason: str = "") -> None:
        """Say on a version's page what became of it: "rolled_back", "abandoned", ..."""
        self.tag(model, version, {STATUS_TAG: status, REASON_TAG: reason})

    def tag(self, model: str, version: str, tags: Mapping[str, str]) -> None:
        """Set tags of a version; its description stays."""
        with _explained(f"tag {model} version {version}"):
            for name, value in tags.items():
                _written(self._client.set_model_version_tag, model, version, name, str(value))

    def files(self, model: str, version: str) -> str:
        """sha256 of a version's files as they lie there now; "" when they are gone. Raises StoreError when they cannot be read."""
        with _explained(f"read the files of {model} version {version}"):
            return files_sha256(version_uri(model, version), tracking_uri=self.tracking_uri)

    def has_run(self, run_id: str) -> bool:
        """False when somebody deleted the run, for good or not: nothing can be written to it."""
        from mlflow.exceptions import MlflowException

        with _explained(f"read run {run_id}"):
            try:
                return str(self._client.get_run(run_id).info.lifecycle_stage) == "active"
            except MlflowException as error:
                if not _is_absent(error):
                    raise
                return False

    def run_tags(self, run_id: str) -> dict[str, str]:
        """A run's tags: "release_id", whose run it is; "mlflow.note.content", what `publish` also put on the version's page."""
        with _explained(f"read run {run_id}"):
            return dict(self._client.get_run(run_id).data.tags)

    def _model(self, model: str) -> "RegisteredModel | None":
        if not self._client.search_registered_models(f"name = '{model}'"):
            return None
        return self._client.get_registered_model(model)

    def _note(self, found: "RegisteredModel", mirrored: Mirrored) -> None:
        """Write down what is being mirrored before the first alias is set, and that it is done after all were read back."""
        if _mirrored(found) != mirrored:
            body = {"sequence": mirrored.sequence, "after": dict(mirrored.after), "before": dict(mirrored.before)}
            _written(self._client.set_registered_model_tag, found.name, MIRROR_TAG, json.dumps(body, sort_keys=True))

    def _point(self, model: str, alias: str, version: str) -> bool:
        """Set an alias, or remove it for ""; False when the version is not registered any more."""
        from mlflow.exceptions import MlflowException

        try:
            if version:
                _written(self._client.set_registered_model_alias, model, alias, version)
            else:
                _written(self._client.delete_registered_model_alias, model, alias)
        except MlflowException as error:
            if not (version and _is_absent(error)):
                raise
            return False
        return True

    def _ensure_experiment(self, name: str, artifacts: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except MlflowException:
                found = self._client.get_experiment_by_name(name)  # another process made it meanwhile
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)


def pointer_aliases(pointer: Pointer) -> dict[str, str]:
    """Alias -> version as the pointer has it; an empty version has no alias."""
    wanted = dict(zip(ALIASES, (pointer.serving_version, pointer.last_known_good, pointer.baseline), strict=True))
    return {alias: version for alias, version in wanted.items() if version}


def mirror_current(registry: Registry, store: ObjectStore, model: str) -> tuple[str, ...]:
    """Make the aliases say what serves now, however the pointer moves meanwhile; returns those that had to be changed.

    Of two processes that mirror two pointers at once, the one with the older pointer may write last; reading the pointer again afterwards
    makes it see that and write anew.
    """
    changed: dict[str, None] = {}
    pointer, _ = read_pointer(store, model)
    for _ in range(_SETTLE_TRIES):
        if pointer is None:
            return ()
        changed |= dict.fromkeys(registry.mirror(pointer))
        mirrored, (pointer, _) = pointer, read_pointer(store, model)
        if pointer == mirrored:
            return tuple(changed)
    raise ConflictError(
        f"the pointer of {model} moved {_SETTLE_TRIES} times while its aliases were set, so they may lag behind it. What serves is the "
        "pointer. Run `seatrial reconcile` when the releases that move it have ended."
    )


def _written(write: Callable[..., object], *values: str) -> None:
    """Set a tag or an alias, again when another process was setting the same one: MLflow looks and then inserts, without a lock.

    Raises: MlflowException, the last one, when it is refused every time or for another reason.
    """
    from mlflow.exceptions import MlflowException

    for left in reversed(range(_WRITE_TRIES)):
        try:
            write(*values)
            return
        except MlflowException as error:
            if not left or str(error.error_code) not in _RACED:
                raise
            time.sleep(random.uniform(0.0, 0.05))


def _mirrored(found: "RegisteredModel | None") -> Mirrored:
    try:
        said = json.loads(found.tags[MIRROR_TAG]) if found is not None else {}
        return Mirrored(sequence=int(said["sequence"]), after=dict(said["after"]), before=dict(said["before"]))
    except (KeyError, ValueError, TypeError):  # never mirrored, or edited by hand: then nothing is known of it
        return Mirrored(sequence=0, after={}, before={})


def _is_absent(error: "MlflowException") -> bool:
    return str(error.error_code) == "RESOURCE_DOES_NOT_EXIST"


def _registered(found: "ModelVersion") -> RegisteredVersion:
    version = str(found.version)
    return RegisteredVersion(
        model=found.name, version=version, run_id=found.run_id or "", model_uri=version_uri(found.name, version),
        sha256=found.tags.get(FILES_TAG, ""),
    )  # fmt: skip


def _fitting(description: str) -> str:
    if len(description) <= _DESCRIPTION_LIMIT:
        return description
    notice = "\n\nCut here: the whole text is in report.html among the run's artifacts."
    return description[: description.rfind("\n", 0, _DESCRIPTION_LIMIT - len(notice))] + notice


def _make_folder(home: Path) -> None:
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the home folder {home} cannot be made ({error}). There is no place for the registry, so nothing was started. "
            "Set SEATRIAL_HOME to a folder that this user can write."
        ) from None


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError  # a database that does not answer at all is told by its own kind

    try:
        yield
    except (MlflowException, SQLAlchemyError) as error:
        raise StoreError(
            f"MLflow could not {what} ({error}). The serving pointer is not touched by that. Check SEATRIAL_MLFLOW_TRACKING_URI and that "
            "the server answers, then run the command again: every step may be repeated."
        ) from shown_cause(error)
