"""What is the next byte of this Python source? Decided while it is typed, from the last T bytes (trainer.recipe.Recipe).

Training asks for the follower of every byte of a window (a byte is seen by those after it only), serving and judging for that of the last
one. The text is the standard library of the interpreter that runs: see bytes_source for what is read, bytes_data for how it is split.
"""

import math

import numpy as np
import numpy.typing as npt
import pandas as pd
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainer.recipe import Batch, Card, Column, DataContract, Outcomes, SplitData, Training
from trainer.recipes.bytes_data import COLUMNS, PERIOD, BytesSplit, T, load_split
from trainer.recipes.bytes_model import BYTES, ByteTransformer, FollowerTable, NextByte, fit_followers

# B = windows, T = bytes of a window, N = windows of a split, V = BYTES
Scores = npt.NDArray[np.float64]  # (N, V) probabilities

# A byte that is put in by itself saves its keystroke. A wrong one costs the keystroke that takes it back and about as much again to notice
# it; typing on costs nothing more than it would have.
SAVED_KEYSTROKES, WASTED_KEYSTROKES = 1.0, 2.0
PUT_IN_ABOVE = WASTED_KEYSTROKES / (SAVED_KEYSTROKES + WASTED_KEYSTROKES)  # where putting it in breaks even: 0.67

# last bytes -> (what a person would expect, how often it came in the train split); the first that fits counts
RULE = {"  ": (" ", 0.88), "\n": (" ", 0.76), ",": (" ", 0.83), ":": ("\n", 0.77), "=": (" ", 0.69), "#": (" ", 0.71)}
RULE_ELSE = ("e", 0.07)
RULE_REST = 1e-3  # share of all bytes together that a person would not think of: outside printable ASCII and the newline

PEAK_LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.99)
WARM_UP_STEPS = 50
LAST_SHARE = 0.03  # of the peak rate, at the end of the cosine


class BytesText:
    """The recipe."""

    name = "bytes"
    card = Card(
        question=f"What is the next byte of this Python source? Decided while it is typed, from the last {T} bytes.",
        action=f"Put the most probable byte in by itself when its probability is {PUT_IN_ABOVE:.2f} or more, else wait for the key.",
        utility_unit="keystrokes saved per byte",
        quality_name="accuracy",
        owner="bytes",
        notes=(
            "The text is the standard library of the interpreter that runs, so its digest belongs to one Python version: evidence made "
            "under another version is stale, and so is a candidate trained there.",
            "Left out: tests, the tables of encodings and pydoc_data, which nobody typed, and what the builder of an interpreter adds.",
            "Split by file, three to train on for one that is judged; a package has files in both, so its names are partly known.",
            "The moments at which bytes were typed are made up; source text has no dates.",
            "Network and training were chosen with judged files of Python 3.11 in view, so its numbers there flatter a little; the target "
            "was set there, too.",
            "A byte is judged by itself: what a wrong one does to those typed after it is not.",
        ),
    )
    training = Training(global_batch_size=64, epochs=1, lanes=8, seed=29, evaluate_every=200, clip_norm=1.0)
    contract = DataContract(
        columns=dict.fromkeys(COLUMNS, Column(kind="number", minimum=9.0, maximum=244.0)),  # tab to the largest first byte of UTF-8
        label="next_byte",
        event_time="typed",
        known_after_cutoff=("following_bytes", "byte_taken_back"),
        min_rows={"train": 40_000, "judge": 4_000},
        period=PERIOD,
        max_gap_days=1.0,
    )
    slices = ("package", "place", "column_band")
    cluster = "file"  # bytes of one file share its names and its author
    target_quality = 0.56

    def data(self, split: str) -> BytesSplit:
        """Open a split; the first call on a machine prepares the text."""
        return load_split(split)

    def model(self) -> nn.Module:
        """Build the untrained transformer."""
        return ByteTransformer(T)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW; biases, LayerNorms and the tables of bytes and positions are not decayed."""
        tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
        decayed = [weight for weight in model.parameters() if weight.ndim > 1 and id(weight) not in tables]
        free = [weight for weight in model.parameters() if weight.ndim < 2 or id(weight) in tables]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": free, "weight_decay": 0.0}]
        return AdamW(groups, lr=PEAK_LEARNING_RATE, betas=BETAS)

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """Linear warm-up, then a cosine down to LAST_SHARE of the peak rate at the last step."""

        def share(step: int) -> float:
            cosine = 0.5 * (1.0 + math.cos(math.pi * min(step / max(steps, 1), 1.0)))
            return min((step + 1) / WARM_UP_STEPS, 1.0) * (LAST_SHARE + (1.0 - LAST_SHARE) * cosine)

        return LambdaLR(optimizer, share)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed log loss and summed weight of a batch's bytes, so that the mean is nats per byte; a window's bytes share its weight."""
        logits_BTV = model(batch.inputs)
        each_BT = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch.labels.flatten(), reduction="none").view_as(batch.labels)
        return (each_BT.sum(dim=1) * batch.weights).sum(), batch.weights.sum() * batch.labels.shape[1]

    def scorer(self, model: nn.Module) -> nn.Module:
        """The model on a window's last byte, with a softmax behind it."""
        return NextByte(model)

    def baseline(self, train: SplitData) -> FollowerTable:
        """Count what followed every two bytes in the train split's windows."""
        batch = train.batch(np.arange(len(train)))
        return fit_followers(np.concatenate([batch.inputs.numpy(), batch.labels.numpy()[:, -1:]], axis=1))

    def rule(self, frame: pd.DataFrame) -> Scores:
        """What a typist expects: indentation goes on, a blank after comma, equals and hash, a new line after a colon; else an e."""
        last, before = (frame[column].to_numpy(np.int64) for column in COLUMNS[-1:-3:-1])
        scores = _expectation(*RULE_ELSE)[None].repeat(len(frame), axis=0)
        for ending, guess in reversed(RULE.items()):
            rows = (last == ord(ending[-1])) & ((before == ord(ending[0])) | (len(ending) == 1))
            scores[rows] = _expectation(*guess)
        return scores

    def outcomes(self, frame: pd.DataFrame, scores: Scores) -> Outcomes:
        """Put in at PUT_IN_ABOVE and more: a keystroke saved if right, two wasted if not, 0 when waiting. NaN stays NaN."""
        label = frame["next_byte"].to_numpy(np.int64)
        confidence = scores.max(axis=1)
        hit = (scores.argmax(axis=1) == label).astype(np.float64)
        put_in = np.where(hit > 0.5, SAVED_KEYSTROKES, -WASTED_KEYSTROKES)
        utility = np.where(np.isnan(confidence), np.nan, np.where(confidence >= PUT_IN_ABOVE, put_in, 0.0))
        chance = np.maximum(scores[np.arange(len(label)), label], 1e-7)
        return Outcomes(utility=utility, loss=-np.log(chance), confidence=confidence, hit=hit)

    def quality(self, frame: pd.DataFrame, scores: Scores) -> float:
        """Share of bytes whose most probable guess was right; NaN if a score is NaN or there is no row."""
        if not len(frame) or np.isnan(scores).any():
            return math.nan
        return float((scores.argmax(axis=1) == frame["next_byte"].to_numpy(np.int64)).mean())


def _expectation(guess: str, share: float) -> Scores:
    """(V,) `share` for the guess, the rest evenly over printable ASCII and the newline, next to nothing for other bytes."""
    scores = np.full(BYTES, RULE_REST / BYTES)
    typed = np.array([ord("\n"), *range(ord(" "), ord("~") + 1)])
    scores[typed] += (1.0 - share - RULE_REST) / len(typed)
    scores[ord(guess)] += share
    return scores


recipe = BytesText()
