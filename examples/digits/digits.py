"""A recipe outside Sea Trial's packages: read a handwritten digit, or hand it to a clerk (trainer.recipe.Recipe).

Started from this folder as `digits:recipe`.
"""

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from trainer.recipe import Batch, Card, Column, DataContract, Outcomes, SplitData, Training

# B = images, N = images of a split
Scores = npt.NDArray[np.float64]  # (N, CLASSES) probabilities

CLASSES, SIDE, BRIGHTEST = 10, 8, 16.0
PIXELS = tuple(f"pixel_{row}_{column}" for row in range(SIDE) for column in range(SIDE))
CENTRE = ("pixel_3_3", "pixel_3_4", "pixel_4_3", "pixel_4_4")

# A right reading saves one keystroke's time, a wrong one costs five to find and mend; what a clerk reads is worth 0.
RIGHT, WRONG = 1.0, -5.0
READ_ABOVE = -WRONG / (RIGHT - WRONG)  # where reading breaks even: 0.83

TRAIN_ROWS = 1000  # of 1,797; the file keeps a writer's digits together, so most judged writers wrote nothing that was trained on
PERIOD = {"train": ("2024-01-01", "2024-03-01"), "judge": ("2024-03-01", "2024-04-01")}  # made up: the file has no dates


class Digits:
    """One split in the file's order; small enough to stay in memory."""

    def __init__(self, split: str) -> None:
        images, digits = load_digits(return_X_y=True)
        rows = slice(0, TRAIN_ROWS) if split == "train" else slice(TRAIN_ROWS, None)
        self.sample_ids = np.arange(len(images), dtype=np.int64)[rows]
        self.inputs = (images[rows] / BRIGHTEST).astype(np.float32)  # (N, 64), 0..1
        self.labels = digits[rows].astype(np.int64)  # (N,)
        self.frame = scan_log(images[rows], self.labels, *PERIOD[split])

    def __len__(self) -> int:
        return len(self.sample_ids)

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Fetch rows: inputs (B, 64), labels (B,), weights (B,) of one."""
        return Batch(torch.from_numpy(self.inputs[rows]), torch.from_numpy(self.labels[rows]), torch.ones(len(rows)))


def scan_log(images: npt.NDArray[np.float64], labels: npt.NDArray[np.int64], first: str, last: str) -> pd.DataFrame:
    """The contract frame: pixels, the moment of the scan (spread evenly over the period), slices and the day's batch."""
    scanned = pd.date_range(first, last, periods=len(images) + 1)[:-1]
    upper, lower = images[:, :32].sum(axis=1), images[:, 32:].sum(axis=1)
    log = pd.DataFrame({
        "scanned": scanned, "day": scanned.strftime("%Y-%m-%d"), "digit": labels,
        "pen": np.where(images.mean(axis=1) < 5.0, "thin", "thick"), "weight": np.where(upper > lower, "above", "below"),
    })  # fmt: skip
    return pd.concat([log, pd.DataFrame(images, columns=list(PIXELS))], axis=1)


class Softmax(nn.Module):
    """Serving module: inputs (B, 64) -> probabilities (B, CLASSES)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.softmax(self.model(inputs), dim=1)


class DigitsRecipe:
    """The recipe."""

    name = "digits"
    card = Card(
        question="Which digit is on this 8 x 8 scan? Decided when it leaves the scanner.",
        action=f"Take the reading when it is sure to {READ_ABOVE:.2f} or more, else hand the scan to a clerk.",
        utility_unit="keystrokes saved per scan",
        quality_name="accuracy",
        owner="post room",
        notes=("The dates of the scans are made up; the order is the file's.",),
    )
    training = Training(global_batch_size=128, epochs=40, lanes=8, seed=1, evaluate_every=40)
    contract = DataContract(
        columns=dict.fromkeys(PIXELS, Column(kind="number", minimum=0.0, maximum=BRIGHTEST)),
        label="digit",
        event_time="scanned",
        known_after_cutoff=("clerk_reading",),
        min_rows={"train": 1000, "judge": 700},
        period=PERIOD,
        max_gap_days=1.0,
    )
    slices = ("pen", "weight")
    cluster = "day"
    target_quality = 0.94

    def data(self, split: str) -> Digits:
        return Digits(split)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(len(PIXELS), 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.3), nn.Linear(128, CLASSES))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        return CosineAnnealingLR(optimizer, T_max=steps, eta_min=1e-4)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed log loss and summed weight of a batch."""
        each = nn.functional.cross_entropy(model(batch.inputs), batch.labels, reduction="none")
        return (each * batch.weights).sum(), batch.weights.sum()

    def scorer(self, model: nn.Module) -> nn.Module:
        return Softmax(model)

    def baseline(self, train: SplitData) -> nn.Module:
        """Multinomial logistic regression on the same pixels."""
        batch = train.batch(np.arange(len(train)))
        fitted = LogisticRegression(max_iter=1000).fit(batch.inputs.numpy(), batch.labels.numpy())
        linear = nn.Linear(len(PIXELS), CLASSES)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(fitted.coef_))
            linear.bias.copy_(torch.from_numpy(fitted.intercept_))
        return Softmax(linear)

    def rule(self, frame: pd.DataFrame) -> Scores:
        """Only a zero is empty in the middle: read that, and hand over all else."""
        scores = np.full((len(frame), CLASSES), 1.0 / CLASSES)
        empty = frame[list(CENTRE)].mean(axis=1).to_numpy() < 0.05 * BRIGHTEST
        scores[empty] = 0.01
        scores[empty, 0] = 1.0 - 0.01 * (CLASSES - 1)
        return scores

    def outcomes(self, frame: pd.DataFrame, scores: Scores) -> Outcomes:
        """Read at READ_ABOVE and more, else hand over. NaN stays NaN."""
        digit = frame["digit"].to_numpy(np.int64)
        confidence = scores.max(axis=1)
        hit = (scores.argmax(axis=1) == digit).astype(np.float64)
        read = np.where(hit > 0, RIGHT, WRONG)
        chance = np.maximum(scores[np.arange(len(digit)), digit], 1e-7)
        utility = np.where(np.isnan(confidence), np.nan, np.where(confidence >= READ_ABOVE, read, 0.0))
        return Outcomes(utility=utility, loss=-np.log(chance), confidence=confidence, hit=hit)

    def quality(self, frame: pd.DataFrame, scores: Scores) -> float:
        """Share of right readings; NaN if a score is NaN."""
        if not len(frame) or np.isnan(scores).any():
            return float("nan")
        return float((scores.argmax(axis=1) == frame["digit"].to_numpy()).mean())


recipe = DigitsRecipe()
