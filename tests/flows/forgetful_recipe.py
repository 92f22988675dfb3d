"""The tiny recipe with own checkpoints: right ones, and ones whose load leaves the optimizer's moments out."""

from pathlib import Path
from typing import Any

import torch
from tiny_recipe import recipe as plain

from trainer.hooks import Hooks, Living


class Files(Hooks):
    """Rank 0 writes one file, every rank reads it."""

    def save(self, folder: Path, living: Living) -> None:
        if living.world.rank == 0:
            assert living.schedule is not None
            parts = {"model": living.model, "optimizer": living.optimizer, "schedule": living.schedule}
            torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "state.pt")

    def load(self, folder: Path, living: Living) -> None:
        held = torch.load(folder / "state.pt")
        assert living.schedule is not None
        living.model.load_state_dict(held["model"])
        living.optimizer.load_state_dict(self.kept(held["optimizer"]))
        living.schedule.load_state_dict(held["schedule"])

    def kept(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """What of the optimizer's state comes back."""
        return optimizer


class Forgetful(Files):
    """Moments are left out."""

    def kept(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        return optimizer | {"state": {}}  # wrong


class Filed:
    """The tiny recipe with these hooks."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def __getattr__(self, name: str) -> Any:
        return getattr(plain, name)


right, forgetful = Filed(Files()), Filed(Forgetful())
