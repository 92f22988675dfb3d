"""The bytes recipe's networks: a small decoder-only transformer, and the table of followers it has to beat."""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

# B = windows, T = bytes of a window, N = windows of a split, R = rows of a table, D = WIDTH, H = HEADS, V = BYTES
BYTES = 256
WIDTH = 64
HEADS = 4
LAYERS = 2
DROPOUT = 0.05
SMOOTHING = 4.0  # how many sightings of a pair weigh as much as what is known of its last byte alone


class Block(nn.Module):
    """Pre-norm causal self-attention and a GELU network, each added to its input: (B, T, D) -> (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # a bias of keys would have no gradient: softmax cancels it
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp_out = nn.Linear(4 * WIDTH, WIDTH)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(DROPOUT)
        for layer in (self.queries_keys_values, self.mlp_in):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.in_features))
        for layer in (self.attention_out, self.mlp_out):  # smaller: 2 * LAYERS of these add up on the way through
            nn.init.normal_(layer.weight, std=1 / math.sqrt(2 * LAYERS * layer.in_features))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        hidden_BTD = hidden_BTD + self.dropout(self.attention_out(self._attended(self.attention_norm(hidden_BTD))))
        widened = self.activation(self.mlp_in(self.mlp_norm(hidden_BTD)))
        added: Tensor = hidden_BTD + self.dropout(self.mlp_out(widened))
        return added

    def _attended(self, hidden_BTD: Tensor) -> Tensor:
        split = self.queries_keys_values(hidden_BTD).unflatten(2, (3, HEADS, WIDTH // HEADS))
        queries, keys, values = (part.transpose(1, 2) for part in split.unbind(2))  # each (B, H, T, D / H)
        heads = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return heads.transpose(1, 2).flatten(2)


class ByteTransformer(nn.Module):
    """Bytes to the logits of each one's follower, seen from the bytes up to it alone; one matrix embeds and predicts (tied)."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Embedding(length, WIDTH)
        self.input_norm = nn.LayerNorm(WIDTH)  # the tied table starts small, for flat first guesses: too small for the blocks to see
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, inputs_BT: Tensor, *, only_last: bool = False) -> Tensor:
        """Logits (B, T, V), or (B, V) of what follows the last byte; T is the length that the model was built for."""
        hidden_BTD = self.dropout(self.input_norm(self.embedding(inputs_BT) + self.positions.weight))
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        hidden = self.norm(hidden_BTD[:, -1] if only_last else hidden_BTD)
        return nn.functional.linear(hidden, self.embedding.weight)


class NextByte(nn.Module):
    """Serving module: inputs (B, T) -> probabilities (B, V) of the byte after the window."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs_BT: Tensor) -> Tensor:
        return torch.softmax(self.model(inputs_BT, only_last=True), dim=1)


class FollowerTable(nn.Module):
    """Serving module: how often each byte followed the window's last two: inputs (B, T) -> probabilities (B, V)."""

    def __init__(self, row_of_pair: Tensor, followers: Tensor) -> None:
        super().__init__()
        self.register_buffer("row_of_pair", row_of_pair)  # (V * V,) int64
        self.register_buffer("followers", followers)  # (R, V) float32; the first V rows are those of a last byte alone

    def forward(self, inputs_BT: Tensor) -> Tensor:
        pair = inputs_BT[:, -2] * BYTES + inputs_BT[:, -1]
        found: Tensor = self.get_buffer("followers")[self.get_buffer("row_of_pair")[pair]]
        return found


def fit_followers(windows: npt.NDArray[np.int64]) -> FollowerTable:
    """Count triples in windows (N, T + 1); each count leans on that of the pair, and the pair's on that of the byte (Dirichlet)."""
    before, last, following = (windows[:, start : windows.shape[1] - 2 + start].ravel() for start in range(3))
    alone = np.bincount(windows.ravel(), minlength=BYTES) + 1.0
    pairs = np.bincount(last * BYTES + following, minlength=BYTES**2).reshape(BYTES, BYTES)
    after_one = _leaning(pairs, np.broadcast_to(alone / alone.sum(), pairs.shape))
    seen, row = np.unique(before * BYTES + last, return_inverse=True)
    triples = np.bincount(row * BYTES + following, minlength=len(seen) * BYTES).reshape(len(seen), BYTES)
    row_of_pair = np.arange(BYTES**2) % BYTES  # a pair never seen: go by its last byte
    row_of_pair[seen] = BYTES + np.arange(len(seen))
    followers = np.concatenate([after_one, _leaning(triples, after_one[seen % BYTES])])
    return FollowerTable(torch.from_numpy(row_of_pair), torch.from_numpy(followers.astype(np.float32)))


def _leaning(counts: npt.NDArray[np.int64], on: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Shares (R, V) of counts (R, V) with SMOOTHING sightings shared out as `on` says."""
    return np.asarray((counts + SMOOTHING * on) / (counts.sum(axis=1, keepdims=True) + SMOOTHING))
