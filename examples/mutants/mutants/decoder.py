"""A small language model on ragged sequences: the recipe that most mutants are made of.

B = sequences, T = LENGTH tokens, D = WIDTH, H = HEADS, V = VOCABULARY.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from mutants.plain import PlainRecipe, Table, log_of, two_groups
from trainer.hooks import Hooks
from trainer.recipe import Batch, Training

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 29, 32, 4, 2, 16
PAD, IGNORED = 0, -1
ROWS = {"train": 120, "judge": 21}
AUXILIARY = 0.02  # share of the auxiliary loss


class Block(nn.Module):
    """Causal attention and a small network, each added to its input: (B, T, D) -> (B, T, D). A bias of keys has no true gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries, self.keys, self.values, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp_in, self.mlp_out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        hidden_BTD = hidden_BTD + self.dropout(self._attended(self.attention_norm(hidden_BTD)))
        widened = nn.functional.gelu(self.mlp_in(self.mlp_norm(hidden_BTD)))
        added: Tensor = hidden_BTD + self.dropout(self.mlp_out(widened))
        return added

    def _attended(self, hidden_BTD: Tensor) -> Tensor:
        parts = (layer(hidden_BTD).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.queries, self.keys, self.values))
        heads_BHTD = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        attended: Tensor = self.out(heads_BHTD.transpose(1, 2).flatten(2))
        return attended


class Language(nn.Module):
    """Tokens to the logits of each one's follower: (B, T) -> (B, T, V); one matrix embeds and predicts (tied)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.input_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, inputs_BT: Tensor) -> Tensor:
        places = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        hidden_BTD = self.dropout(self.input_norm(self.embedding(inputs_BT) + self.positions(places)))
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        logits: Tensor = self.output(self.norm(hidden_BTD))
        return logits


class Branched(Language):
    """A side branch for sequences that begin with an odd token; a micro-batch without one does not use it at all."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs_BT: Tensor) -> Tensor:
        logits = super().forward(inputs_BT)
        odd = inputs_BT[:, 0] % 4 == 1
        if not odd.any():
            return logits
        return logits + odd[:, None, None] * self.side(self.embedding(inputs_BT))


class LastToken(nn.Module):
    """Serving module: inputs (B, T) -> probabilities (B, V) of what follows the last token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs_BT: Tensor) -> Tensor:
        last = (inputs_BT != PAD).sum(dim=1).clamp(min=1) - 1
        return torch.softmax(self.model(inputs_BT)[torch.arange(len(inputs_BT)), last], dim=1)


def sequences(split: str, *, even: bool = False) -> Table:
    """Sequences of 2 to 16 tokens (all of 9 when `even`), padded; most tokens follow from the one before."""
    draw = np.random.default_rng(11 if split == "train" else 12)
    rows = ROWS[split]
    sizes = np.full(rows, 9) if even else draw.integers(2, LENGTH + 1, size=rows)
    tokens = draw.integers(1, VOCABULARY, size=(rows, LENGTH + 1))
    for place in range(1, LENGTH + 1):
        follows = draw.random(rows) < 0.8
        tokens[follows, place] = (tokens[follows, place - 1] * 3 + 1) % (VOCABULARY - 1) + 1
    inside = np.arange(LENGTH) < sizes[:, None]
    known = np.arange(LENGTH) < sizes[:, None] - 1
    inputs, labels = np.where(inside, tokens[:, :LENGTH], PAD), np.where(known, tokens[:, 1:], IGNORED)
    frame = log_of(split, tokens[np.arange(rows), sizes], sizes)
    return Table(split, torch.from_numpy(inputs), torch.from_numpy(labels), frame)


def target_weight(batch: Batch) -> Tensor:
    """What the targets of a batch count for together: its target tokens, each times its sequence's weight."""
    return ((batch.labels != IGNORED).sum(dim=1) * batch.weights).sum()


class Decoder(PlainRecipe):
    """The recipe: summed log loss of all target tokens; a sequence weighs as much as it has targets."""

    name = "mutant-decoder"
    classes = VOCABULARY
    training = Training(global_batch_size=16, epochs=3, lanes=4, seed=5, evaluate_every=4, clip_norm=1.0)

    def __init__(
        self, hooks: Hooks | None = None, excludes: Mapping[str, str] | None = None, *, even: bool = False, branched: bool = False
    ) -> None:
        """Args: even, all sequences have the same length and weight; branched, some samples go through a branch of their own."""
        super().__init__(hooks, excludes)
        self.even, self.branched = even, branched
        if even:  # a last, smaller batch would not have the same on every rank
            self.training = replace(self.training, tail="drop")

    def data(self, split: str) -> Table:
        return sequences(split, even=self.even)

    def model(self) -> nn.Module:
        return Branched() if self.branched else Language()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return two_groups(model)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum over target tokens, and how many they are; each times its sequence's weight."""
        logits_BTV = model(batch.inputs)
        weights = torch.ones_like(batch.weights) if self.even else batch.weights
        each_BT = nn.functional.cross_entropy(logits_BTV.transpose(1, 2), batch.labels, reduction="none", ignore_index=IGNORED)
        return (each_BT.sum(dim=1) * weights).sum(), target_weight(batch._replace(weights=weights))

    def scorer(self, model: nn.Module) -> nn.Module:
        return LastToken(model)


def squared_logits(logits_BTV: Tensor, batch: Batch) -> Tensor:
    """An auxiliary loss that keeps logits small: sum over target tokens of their squared log partition, each times its weight."""
    seen_BT = (batch.labels != IGNORED) * batch.weights[:, None]
    return (torch.logsumexp(logits_BTV, dim=2).square() * seen_BT).sum()


class AuxiliaryDecoder(Decoder):
    """With an auxiliary loss over the same tokens."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        handle = model.register_forward_hook(lambda _module, _inputs, logits: kept.append(logits))
        loss_sum, weight = super().loss(model, batch)
        handle.remove()
        return loss_sum + self.auxiliary(squared_logits(kept[0], batch)), weight

    def auxiliary(self, total: Tensor) -> Tensor:
        """What the auxiliary sum of this rank's samples adds to its loss."""
        return AUXILIARY * total


recipe = Decoder()
auxiliary = AuxiliaryDecoder()
