"""The closed list of kinds that a first divergence is sorted into: what each looks like, and what to do about it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal[
    "not_a_number", "not_split", "rank_order", "padding", "samples", "epoch_order", "order", "content", "claims", "evaluation",
    "streams", "no_draws", "rates",
    "no_reduction", "unreduced_tensors", "buffers", "clipping", "update", "nothing_moves", "still", "initial_weights",
    "factor", "no_gradient", "some_tensors", "per_rank", "per_micro_batch", "every_size", "leftover", "precision", "torch_reduction",
    "world_size", "shared", "poison", "intermittent",
    "weights", "weights_rounded", "averages", "averages_as_weights", "moments_lost", "moments_swapped", "moments", "step_count", "schedule",
    "loss_scale", "random_streams", "position", "settings", "not_in_state", "unknown",
]  # fmt: skip


class Meaning(NamedTuple):
    """What a kind looks like, and what to do next."""

    signature: str
    next_step: str


KINDS: dict[Kind, Meaning] = {
    # what the ranks trained on
    "not_split": Meaning(
        "several ranks, or several loader workers of one, consumed the same samples",
        "split the data by rank, and in a rank by loader worker: give the sampler or the iterable dataset both numbers",
    ),
    "rank_order": Meaning(
        "samples of the step are repeated and others missing, by other amounts on each rank",
        "seed the sampler alike on every rank: the seed may depend on the epoch, never on the rank",
    ),
    "padding": Meaning(
        "samples are repeated and none is missing, or the reverse, at the end of an epoch",
        "make the last batch uneven instead of repeating or dropping samples, or weigh repeats with zero",
    ),
    "samples": Meaning("a step consumed other samples than one process would", "look at how the sampler maps steps and ranks to rows"),
    "epoch_order": Meaning("two epochs in the same order", "tell the sampler the epoch before each one (`set_epoch`)"),
    "order": Meaning("right samples of the run, at other steps or positions", "look at the sampler: how ranks and lanes map to positions"),
    "content": Meaning(
        "right sample ids, other bytes in input, label or weight",
        "fetch this sample alone and on a worker, and look at the loader, the collate function and the augmentation's seed",
    ),
    "claims": Meaning(
        "the ledger names other samples than the loss was computed of", "write the ledger from the batch, not from the sampler"
    ),
    "evaluation": Meaning(
        "samples counted twice or never in an evaluation, or another quality than one process measures",
        "drop the sampler's padding before the metric, and compute it from all ranks' rows together",
    ),
    "streams": Meaning(
        "two draws of random numbers found a generator in the same state", "seed each stream by (seed, step or epoch, rank, worker)"
    ),
    "no_draws": Meaning(
        "forward passes draw no random numbers, though the model has dropout",
        "call `train()` on the module before each step: an evaluation has left it in eval mode",
    ),
    # how ranks come to one gradient
    "no_reduction": Meaning(
        "most gradients differ between ranks", "call the wrapped module, reduce after the last micro-batch, and check the group's size"
    ),
    "unreduced_tensors": Meaning(
        "a few gradients differ between ranks",
        "put these tensors into the reduction: they were frozen, unused, tied or made after wrapping",
    ),
    "buffers": Meaning(
        "buffers differ between ranks or world sizes, or statistics are those of one rank",
        "use statistics over all ranks' samples (SyncBatchNorm), or broadcast the buffers after the step; in a resume: save and load them",
    ),
    "world_size": Meaning(
        "ranks agree with each other and not with other world sizes",
        "look for what depends on the number of ranks: the order of the sum, the random streams, the lanes",
    ),
    "intermittent": Meaning(
        "the same gradient computed again has other bits",
        "test links and memory of these ranks; look for a race: a buffer read before its collective is done",
    ),
    "poison": Meaning(
        "ranks or world sizes answer a bad micro-batch differently",
        "decide on all ranks' losses or gradients together (reduce the flag, then wait for it) before anybody skips, and clear the "
        "gradient that was skipped",
    ),
    # what the gradient is
    "not_a_number": Meaning("NaN or infinity", "look for an overflow or a division by zero in loss, weight or noise estimate"),
    "factor": Meaning("one same factor on most tensors", "divide the sum by the global weight exactly once"),
    "no_gradient": Meaning("most gradients are zero", "look for a detached loss, a gradient cleared after backward, or a wrong `.grad`"),
    "some_tensors": Meaning(
        "one or a few tensors are off", "look at what only these take part in: tied, frozen, unused or auxiliary parts, their reduction"
    ),
    "per_rank": Meaning(
        "most tensors are off, each by its own amount, with more than one rank only",
        "divide by the global weight instead of each rank's own, and couple samples (statistics, contrast) over all ranks",
    ),
    "per_micro_batch": Meaning(
        "most tensors are off, each by its own amount, on one rank too, and steps have several micro-batches",
        "sum the micro-batches' losses and divide once by the weight of the whole window; clip once, before the update",
    ),
    "every_size": Meaning(
        "most tensors are off, each by its own amount, on one rank too, with one micro-batch",
        "compare the step's loss with the recipe's on one batch: another term, mode (train, eval), precision or weight",
    ),
    "leftover": Meaning(
        "most tensors are off on one rank too, in a later step, and the first step is right",
        "clear the gradients before each update (zero_grad), and look for what else one update leaves the next: a window, a mode, a cache",
    ),
    "shared": Meaning(
        "autograd and finite differences disagree", "look at custom backward functions, detached parts and in-place changes of the loss"
    ),
    "initial_weights": Meaning(
        "the gradient is right for the weights it was taken at, but these are not the reference's, from the first step on",
        "build the model from the same seed on every rank, or broadcast rank 0's weights before the first step",
    ),
    "precision": Meaning(
        "errors the size of a narrower type's rounding, without a direction",
        "keep gradients, sums and master weights in the training precision; name a forward pass that is narrower on purpose in "
        "training.autocast",
    ),
    "torch_reduction": Meaning(
        "only the leg with torch's own reduction is off", "train with the exact reduction, or look at the wrapper's hooks"
    ),
    # what becomes of it
    "clipping": Meaning(
        "right before clipping and wrong after it, or a norm beyond the limit",
        "take the norm of the whole mean gradient over all ranks' parts, once, after the last micro-batch, and scale on every rank",
    ),
    "update": Meaning(
        "right gradients, wrong update",
        "look at the optimizer: groups, decay, master weights, what it shards, and whether every rank steps",
    ),
    "nothing_moves": Meaning(
        "no weight changes", "build the optimizer from the parameters that train: after wrapping, sharding and moving"
    ),
    "still": Meaning(
        "a tensor that wants a gradient never changed",
        "give it to the optimizer, to the loss and to the reduction (no_sync, set_requires_gradient_sync), or set requires_grad to False "
        "before the optimizer is built",
    ),
    "rates": Meaning("other learning rates than one process has", "step the schedule once per update, whatever the number of ranks"),
    # what a resume lost
    "weights": Meaning("weights that were loaded are not those that were saved", "compare these tensors in the file with the saved ones"),
    "weights_rounded": Meaning("weights came back rounded to a narrower type", "save and load the master weights in their own precision"),
    "averages": Meaning(
        "averaged weights (EMA) were lost or changed in a resume, or depend on the number of ranks",
        "save and load the averages with their counter, and move them once an update, after it",
    ),
    "averages_as_weights": Meaning(
        "the averaged weights were loaded as the weights", "load weights and averages each from their own entry"
    ),
    "moments_lost": Meaning(
        "the optimizer came back without its moments", "fill the optimizer's state before loading into it, or load by its own state_dict"
    ),
    "moments_swapped": Meaning("a tensor got another tensor's moments", "match the optimizer's state by parameter name, not by position"),
    "moments": Meaning("moments were loaded that are not those that were saved", "compare the optimizer's entries in the file by name"),
    "step_count": Meaning("the optimizer's own step counter is off", "save and load the optimizer's counters with its moments"),
    "schedule": Meaning("the schedule or a learning rate came back at another step", "save the schedule after its own step, and load it"),
    "loss_scale": Meaning("the loss scale was lost", "save and load the loss scaler"),
    "random_streams": Meaning("a random generator was not brought back", "save each rank's generators, and restore them after the skip"),
    "position": Meaning(
        "the data goes on at another place",
        "count samples over the whole run, micro-batches and earlier resumes included, and restore the epoch with the place",
    ),
    "settings": Meaning(
        "an optimizer setting came back with another value", "compare the optimizer's groups in the file with the recipe's"
    ),
    "not_in_state": Meaning(
        "what was loaded is what was saved, and the run still parts from its twin",
        "find what the future depends on and no save holds: a random stream, the place in the data, a cache, a buffer outside state_dict",
    ),
    "unknown": Meaning("a pattern without a name", "start at the first divergence and compare by hand"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a first divergence looks like, what it most likely is, and what to do next."""

    kind: Kind
    words: str

    @property
    def next_step(self) -> str:
        """What to do next: the same for every divergence of a kind."""
        return KINDS[self.kind].next_step

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')}: {self.words}; {self.next_step}"


def said(kind: Kind, words: str) -> str:
    """A diagnosis as text: its kind, what was seen, what to do next."""
    return str(Diagnosis(kind=kind, words=words))


def is_said(text: str, kind: Kind) -> bool:
    """Whether a text of `said` is of this kind."""
    return text.startswith(f"{kind.replace('_', ' ')}: ")
