"""Will this flight out of New York arrive 15 or more minutes late? Decided at its scheduled departure (trainer.recipe.Recipe).

No class is resampled: the loss is the plain log loss, so the scores are probabilities as they come, and the decision threshold
follows from what the action is worth (WARN_ABOVE), not from the share of late flights.
"""

import math

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainer.recipe import Batch, Card, DataContract, Outcomes, SplitData, Training
from trainer.recipes.flights_data import CONTINUOUS, LIVE_PERIOD, PERIOD, FlightsSplit, load_encoding, load_split
from trainer.recipes.flights_features import CATEGORIES, COLUMNS

# B = flights, F = flights_data.FEATURES
Scores = npt.NDArray[np.float64]

# A flight that is late is so by 42 minutes in the median: told at the scheduled departure, a passenger makes use of about 30 of
# them (stays put, moves the meeting, calls off the pick-up). Told in vain, about 10 minutes go into plans that are undone.
SAVED_MINUTES, WASTED_MINUTES = 30.0, 10.0
WARN_ABOVE = WASTED_MINUTES / (SAVED_MINUTES + WASTED_MINUTES)  # where the expected worth of a warning turns positive: 0.25

# (is the airport's mean delay over the last two hours above 15 minutes, is it 15:00 or later) -> share late in January-September
RULE_MINUTES, RULE_HOUR = 15.0, 15.0
RULE_SHARES = {(True, True): 0.55, (True, False): 0.44, (False, True): 0.22, (False, False): 0.16}

EMBEDDING_SIZES = (2, 6, 8, 8)  # in the order of CATEGORIES: 3 origins, 16 carriers, about 100 destinations and 125 models
HIDDEN_SIZES = (256, 128)
DROPOUT = 0.2
PEAK_LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.01
WARM_UP_STEPS = 30
LAST_SHARE = 0.02  # of the peak rate, at the end of the cosine


class LateNet(nn.Module):
    """Embeddings and a small MLP: inputs (B, F) -> logits (B,)."""

    def __init__(self, category_sizes: tuple[int, ...]) -> None:
        super().__init__()
        # code 0, never seen in training, stays at zero: the middle of what was seen
        self.embeddings = nn.ModuleList(
            nn.Embedding(count, width, padding_idx=0) for count, width in zip(category_sizes, EMBEDDING_SIZES, strict=True)
        )
        layers: list[nn.Module] = []
        width = CONTINUOUS + sum(EMBEDDING_SIZES)
        for hidden in HIDDEN_SIZES:
            layers += [nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Dropout(DROPOUT)]
            width = hidden
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, inputs_BF: Tensor) -> Tensor:
        codes = inputs_BF[:, CONTINUOUS:].long()
        embedded = [embedding(codes[:, place]) for place, embedding in enumerate(self.embeddings)]
        logits: Tensor = self.layers(torch.cat([inputs_BF[:, :CONTINUOUS], *embedded], dim=1)).squeeze(1)
        return logits


class LateLogistic(nn.Module):
    """Logistic regression with one weight a category value: inputs (B, F) -> logits (B,)."""

    def __init__(self, category_sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(CONTINUOUS, 1)
        self.offsets = nn.ModuleList(nn.Embedding(count, 1, padding_idx=0) for count in category_sizes)

    def forward(self, inputs_BF: Tensor) -> Tensor:
        codes = inputs_BF[:, CONTINUOUS:].long()
        logits: Tensor = self.linear(inputs_BF[:, :CONTINUOUS])
        for place, offset in enumerate(self.offsets):
            logits = logits + offset(codes[:, place])
        return logits.squeeze(1)


class Probability(nn.Module):
    """Serving module: inputs (B, F) -> probability of being late (B,)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs_BF: Tensor) -> Tensor:
        return torch.sigmoid(self.model(inputs_BF))


class Flights:
    """The recipe."""

    name = "flights"
    card = Card(
        question="Will this flight out of New York arrive 15 or more minutes late? Decided at its scheduled departure.",
        action=f"Warn its passengers when the probability is {WARN_ABOVE:.2f} or more.",
        utility_unit="minutes per passenger and flight",
        quality_name="ROC AUC",
        owner="flights",
        notes=(
            "Cancelled and diverted flights (7,747 in January-September, 568 in October-November) have no arrival and are neither "
            "trained on nor judged; until they fail to leave they count in the queues of others.",
            "The tail number is the aircraft that flew; a swap after the scheduled departure would not have been known.",
            "Weather is the last report of the hour before; a report missing there is filled with the train mean and flagged.",
            "Trained on January-September (25.0% late), judged on October-November (17.8%); the history columns carry the shift.",
            "Columns and network were chosen with October-November in view, so its numbers flatter a little; December is live.",
        ),
    )
    training = Training(global_batch_size=4096, epochs=6, lanes=8, seed=13, evaluate_every=20, clip_norm=1.0)
    contract = DataContract(
        columns=COLUMNS,
        label="late",
        event_time="departure",
        known_after_cutoff=("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "left", "landed"),
        min_rows={"train": 200_000, "judge": 40_000},
        period=PERIOD,
        max_gap_days=2.0,
    )
    slices = ("origin", "carrier", "hour_band", "month", "weather_band", "distance_band")
    cluster = "day"  # flights of one day share its weather and its queues
    target_quality = 0.768
    live_period = LIVE_PERIOD

    def data(self, split: str) -> FlightsSplit:
        """Open a split; the first call on a machine prepares train and judge, or live."""
        return load_split(split)

    def model(self) -> nn.Module:
        """Build the untrained network for the train split's vocabulary."""
        return LateNet(load_encoding().sizes())

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW; biases, LayerNorms and embeddings are not decayed."""
        kept = {id(weight) for part in model.modules() if isinstance(part, nn.Embedding) for weight in part.parameters()}
        decayed = [weight for weight in model.parameters() if weight.ndim > 1 and id(weight) not in kept]
        free = [weight for weight in model.parameters() if weight.ndim < 2 or id(weight) in kept]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": free, "weight_decay": 0.0}]
        return AdamW(groups, lr=PEAK_LEARNING_RATE)

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """Linear warm-up, then a cosine down to LAST_SHARE of the peak rate at the last step."""

        def share(step: int) -> float:
            cosine = 0.5 * (1.0 + math.cos(math.pi * min(step / max(steps, 1), 1.0)))
            return min((step + 1) / WARM_UP_STEPS, 1.0) * (LAST_SHARE + (1.0 - LAST_SHARE) * cosine)

        return LambdaLR(optimizer, share)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed log loss and summed weight of a batch."""
        each = nn.functional.binary_cross_entropy_with_logits(model(batch.inputs), batch.labels, reduction="none")
        return (each * batch.weights).sum(), batch.weights.sum()

    def scorer(self, model: nn.Module) -> nn.Module:
        """The model with a sigmoid behind it."""
        return Probability(model)

    def baseline(self, train: SplitData) -> nn.Module:
        """Fit scikit-learn's logistic regression on the same inputs, categories one-hot, as a module with scorer's shapes."""
        from sklearn.linear_model import LogisticRegression  # only here: it takes seconds to import

        batch = train.batch(np.arange(len(train)))
        model = LateLogistic(load_encoding().sizes())
        inputs, widths = _one_hot(batch.inputs.numpy(), [offset.num_embeddings for offset in _embeddings(model)])
        fitted = LogisticRegression(C=1.0, max_iter=400, tol=1e-3).fit(inputs, batch.labels.numpy())
        weights = torch.from_numpy(fitted.coef_[0].astype(np.float32))
        with torch.no_grad():
            model.linear.weight.copy_(weights[None, :CONTINUOUS])
            model.linear.bias.fill_(float(fitted.intercept_[0]))
            for offset, part in zip(_embeddings(model), torch.split(weights[CONTINUOUS:], widths), strict=True):
                offset.weight[1:, 0] = part
        return Probability(model)

    def rule(self, frame: pd.DataFrame) -> Scores:
        """A dispatcher's look at the board: does the airport run late, and is it afternoon?"""
        runs_late = frame["origin_left_delay_120m"].to_numpy() > RULE_MINUTES
        is_afternoon = frame["hour"].to_numpy() >= RULE_HOUR
        cases = [(runs_late == late) & (is_afternoon == afternoon) for late, afternoon in RULE_SHARES]
        return np.select(cases, list(RULE_SHARES.values())).astype(np.float64)

    def outcomes(self, frame: pd.DataFrame, scores: Scores) -> Outcomes:
        """Warn at WARN_ABOVE and more: minutes saved if the flight was late, wasted if not, 0 without a warning. NaN stays NaN."""
        late = frame["late"].to_numpy(np.float64)
        warned = np.where(late > 0.5, SAVED_MINUTES, -WASTED_MINUTES)
        utility = np.where(np.isnan(scores), np.nan, np.where(scores >= WARN_ABOVE, warned, 0.0))
        chance = np.clip(scores, 1e-7, 1.0 - 1e-7)
        return Outcomes(utility=utility, loss=-np.log(np.where(late > 0.5, chance, 1.0 - chance)), confidence=scores, hit=late)

    def quality(self, frame: pd.DataFrame, scores: Scores) -> float:
        """ROC AUC: how often a late flight scores above a punctual one, ties counting half. NaN if a score is NaN or a class is absent."""
        late = frame["late"].to_numpy() > 0.5
        pairs = int(late.sum()) * int((~late).sum())
        if not pairs or np.isnan(scores).any():
            return math.nan
        _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
        return float((ranks[late].sum() - late.sum() * (late.sum() + 1) / 2) / pairs)


def _embeddings(model: LateLogistic) -> list[nn.Embedding]:
    return [part for part in model.offsets if isinstance(part, nn.Embedding)]


def _one_hot(inputs: npt.NDArray[np.float32], sizes: list[int]) -> tuple[npt.NDArray[np.float32], list[int]]:
    """Inputs with each code column as one column for each value but the reserved 0; and how many columns each category got."""
    widths = [size - 1 for size in sizes]
    wide = np.zeros((len(inputs), CONTINUOUS + sum(widths)), np.float32)
    wide[:, :CONTINUOUS] = inputs[:, :CONTINUOUS]
    first = CONTINUOUS
    for place in range(len(CATEGORIES)):
        code = inputs[:, CONTINUOUS + place].astype(np.int64)
        seen = np.flatnonzero(code)
        wide[seen, first + code[seen] - 1] = 1.0
        first += widths[place]
    return wide, widths


recipe = Flights()
