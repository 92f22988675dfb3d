"""Runs that a test writes by itself: what an audited run leaves, made of a plain training and then spoiled."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.plain import Moment, Setting, train
from trainer.problem import Problem
from trainer.reference_noise import gradients_at

Kept = dict[str, Tensor]


def leave(folder: Path, problem: Problem, setting: Setting, **spoilt: Callable[[str, int, Tensor], Tensor | None]) -> dict[str, Any]:
    """Write a float64 run that trained under `setting`, re-ordered, and describe it for `gradient_errors`.

    Args: spoilt, stage -> (name, step, tensor) -> what is left instead, None = nothing.
    """
    kept: Kept = {}
    for step, moment in enumerate(train(problem, setting, shuffled=torch.Generator().manual_seed(5))):
        _keep(kept, step, moment.weights, _stages(moment), spoilt)
    return _written(folder, kept, "float64")


def leave32(folder: Path, problem: Problem, setting: Setting, **spoilt: Callable[[str, int, Tensor], Tensor | None]) -> dict[str, Any]:
    """The same as a float32 run would: gradients at its own, rounded weights."""
    kept: Kept = {}
    for step, moment in enumerate(train(problem, setting)):
        weights = {name: value.float() for name, value in moment.weights.items()}
        found = {
            stage: {name: value.float() for name, value in values.items()}
            for stage, values in gradients_at(problem, setting, weights, step).items()
        }
        _keep(
            kept, step, weights, found | {"after": {name: weights[name] + value.float() for name, value in moment.update.items()}}, spoilt
        )
    return _written(folder, kept, "float32")


def _stages(moment: Moment) -> dict[str, dict[str, Tensor]]:
    after = {name: moment.weights[name] + value for name, value in moment.update.items()}
    return {"reduced": moment.reduced, "clipped": moment.clipped, "after": after}


def _keep(
    kept: Kept, step: int, weights: Mapping[str, Tensor], stages: Mapping[str, Mapping[str, Tensor]], spoilt: Mapping[str, Any]
) -> None:
    kept |= {f"step{step}/weights/{name}": value.clone() for name, value in weights.items()}
    for stage, values in stages.items():
        head = f"step{step}/" if stage == "reduced" else f"step{step}/{stage}/"
        for name, value in values.items():
            left = spoilt.get(stage, lambda _name, _step, value: value)(name, step, value)
            if left is not None:
                kept[head + name] = left.clone()


def _written(folder: Path, kept: Kept, precision: str) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(kept, folder / "gradients.safetensors")
    return {"leg": "logic", "world_size": 2, "folder": str(folder), "precision": precision}
