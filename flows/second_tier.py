"""`seatrial train --mirror`: a thread that copies what the run seals to the object store while the ranks train, and the way back."""

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from infra.mirror import Mirror
from infra.mirror_fetch import Fetched, fetch
from infra.mirror_layout import read_claim, step_of, stored_job
from infra.settings import Settings
from infra.store import ObjectStore, open_store
from trainer.seal_key import seal_key
from validation.errors import ConfigError, DataError, InputError, StoreError

SYNC_S = 1.0  # between looks at the run's folder


class SecondTier:
    """One run's place in the object store. As a context manager it mirrors the run's folder until the block ends."""

    def __init__(self, settings: Settings, run: str, folder: Path) -> None:
        """Raises ConfigError when the store cannot be used: asked for by name, it may not be missing silently."""
        try:
            self._store: ObjectStore = open_store(settings)
        except StoreError as error:
            raise ConfigError(f"--mirror has no store to write to: {error} Nothing was started. Or train without --mirror.") from None
        self._run, self._folder, self._key = run, folder, seal_key()
        self._fetched = Fetched(step=None, refused=(), messages=())
        self._mirror: Mirror | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="mirror", daemon=True)

    def job(self) -> bytes | None:
        """job.json of the run in the store; None when the run is not there. Raises DataError when all but this file is."""
        stored = stored_job(self._store, self._run)
        if stored is None and (claim := read_claim(self._store, self._run)[0]) is not None:
            raise DataError(
                f"the store has step {claim.step} of run {self._run} and not its job.json, so it cannot be told which training it is. "
                "Beginning it again would lose those steps, so nothing was started. Restore that object, or choose another --run name."
            )
        return stored

    def fetch(self) -> None:
        """Bring the run from the store into its folder, which does not exist yet."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._fetched = fetch(self._store, self._run, self._folder, key=self._key)

    def check_newest(self) -> None:
        """Refuse a folder that is behind the store: another node went on with the run since. Raises ConfigError."""
        claim, _ = read_claim(self._store, self._run)
        here = max((step_of(path.name) or 0 for path in self._folder.glob("checkpoints/step-*")), default=0)
        if claim is not None and claim.step > here:
            raise ConfigError(
                f"the store has step {claim.step} of run {self._run}, and the newest checkpoint in {self._folder} is of step {here}: the "
                "run went on somewhere else. Nothing was started. Move this folder away, and the same command goes on from the store; or "
                "train without --mirror."
            )

    @property
    def messages(self) -> list[str]:
        """What a person should know about where the run was taken up."""
        begun = [] if self._fetched.step is None else [f"fetched step {self._fetched.step} from the store"]
        return [*begun, *self._fetched.messages]

    def document(self) -> Mapping[str, Any]:
        """What became of the copying: steps now complete in the store, and what went wrong."""
        mirror = self._mirror
        return {
            "uploaded": sorted(mirror.uploaded) if mirror else [],
            "problems": list(mirror.problems) if mirror else [],
            "fetched_step": self._fetched.step,
            "messages": self.messages,
        }

    def __enter__(self) -> "SecondTier":
        self._mirror = Mirror(self._store, self._folder, self._run, key=self._key, refused=self._fetched.refused)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        # a run that failed is worth copying whole, one that was refused never was; who interrupts does not want to wait
        if self._mirror is not None and (kind is None or not issubclass(kind, InputError | KeyboardInterrupt)):
            self._mirror.sync(last=True)

    def _copy(self) -> None:
        while not self._over.wait(SYNC_S):
            if self._mirror is not None:
                self._mirror.sync()
