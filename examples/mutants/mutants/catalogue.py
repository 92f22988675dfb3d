"""Every mutant and every control by name: what is wrong with it, where it is from, and which gate has to say so.

Ids SE-, SYN- and NC- are those of a catalogue of publicly reported cases; titles are ours. Sources are threads in public repositories.
Classes: A normalisation, B batch-coupled losses and statistics, C synchronisation, D clipping and precision, E construction, F data and
randomness, G resuming the data, H resuming the state.
"""

from dataclasses import dataclass

GRADIENT, RESUME, REFUSED = "gradient_equivalence", "kill_and_resume", "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recipe, and what has to be said about it."""

    id: str
    fault: str  # class letter, "" for a control
    title: str
    recipe: str  # import path
    gate: str  # that has to see it; for a control: that has to pass
    kinds: tuple[str, ...] = ()  # of its first divergence, see validation.diagnosis; any of these
    tensor: str = ""  # that has to be named
    also: tuple[str, ...] = ()  # other gates that may rightly see it first
    world_sizes: tuple[int, ...] = (1, 2)
    source: str = "own"
    quick: bool = False  # in the sample that every test run makes

    @property
    def is_control(self) -> bool:
        """Whether there is nothing wrong with it."""
        return not self.fault


def _wrong(id: str, fault: str, title: str, recipe: str, gate: str = GRADIENT, **more: object) -> Case:
    return Case(id=id, fault=fault, title=title, recipe=f"mutants.{recipe}", gate=gate, **more)  # type: ignore[arg-type]


def _right(id: str, title: str, recipe: str, gate: str = GRADIENT, **more: object) -> Case:
    return Case(id=id, fault="", title=title, recipe=f"mutants.{recipe}", gate=gate, **more)  # type: ignore[arg-type]


A = (
    _wrong("SE-01", "A", "each micro-batch's mean, averaged", "normalisation:se_01", source="huggingface/transformers#34191"),
    _wrong("SE-01-loss", "A", "the loss is a mean", "normalisation:se_01_loss", REFUSED, source="huggingface/transformers#34191"),
    _wrong("SE-02", "A", "tokens counted on each rank alone", "normalisation:se_02", quick=True, source="huggingface/transformers#34242"),
    _wrong("SE-04", "A", "token means weighed by samples", "normalisation:se_04", source="verl-project/verl#5625"),
    _wrong("SE-04-loss", "A", "the same inside the loss", "normalisation:se_04_loss", also=(REFUSED,), source="verl-project/verl#5625"),
    _wrong("SE-05", "A", "divided by the accumulation once more", "normalisation:se_05", source="unslothai/unsloth-zoo#1023"),
    _wrong("SE-05-ranks", "A", "divided by the world size once more", "normalisation:se_05_ranks", source="unslothai/unsloth-zoo#1023"),
    _wrong("SE-08", "A", "the auxiliary loss divided by W", "normalisation:se_08", source="NVIDIA/Megatron-LM#3672"),
    _wrong("SYN-04", "A", "every gradient one per cent too large", "normalisation:syn_04", source="synthetic"),
    _wrong("OWN-01", "A", "the last rank's loss scaled by two", "normalisation:own_01"),
    _wrong("OWN-02", "A", "divided by the tokens of the window before", "normalisation:own_02"),
    _wrong("OWN-03", "A", "rank 0's tokens stand for everyone's", "normalisation:own_03"),
)
B = (
    _wrong("SE-10", "B", "embeddings gathered without a gradient", "coupled:se_10", quick=True, source="lightly-ai/lightly#1977"),
    _wrong("SE-10-rows", "B", "the other ranks' views get no gradient", "coupled:se_10_rows", source="mlfoundations/open_clip#616"),
    _wrong("SE-10-local", "B", "the other ranks' samples are no negatives", "coupled:se_10_local", source="texttron/tevatron#30"),
    _wrong("SE-12", "B", "a factor W for a gather that never was", "coupled:se_12", source="lightonai/pylate#156"),
    _wrong("SE-13", "B", "BatchNorm by each rank's own samples", "coupled:se_13", source="pytorch/pytorch#62967"),
    _wrong("SE-13-buffers", "B", "running statistics drift apart", "coupled:se_13_buffers", source="huggingface/pytorch-image-models#110"),
    _wrong("OWN-04", "B", "targets right on rank 0 alone", "coupled:own_04"),
)
C = (
    _wrong("SE-15", "C", "the last micro-batch is not reduced", "synchronisation:se_15", quick=True, source="modelscope/FunASR#3472"),
    _wrong("SE-16", "C", "moved after wrapping: stale hooks", "synchronisation:se_16", source="pytorch/pytorch#104336"),
    _wrong(
        "SE-18", "C", "one layer frozen while wrapped", "synchronisation:se_18", tensor="blocks.1.mlp_out.weight", source="NVIDIA/apex#46"
    ),
    _wrong("SE-19", "C", "the loss goes around the wrapper", "synchronisation:se_19", source="TrainCheck: jxmnop-ddp-out-of-sync"),
    _wrong("SE-21", "C", "groups of one rank: nothing is shared", "synchronisation:se_21", source="verl-project/verl#7493"),
    _wrong("SE-23", "C", "a branch of early micro-batches is not reduced", "synchronisation:se_23", source="pytorch/pytorch#69031"),
    _wrong("SE-24", "C", "one LayerNorm left out of the sum", "synchronisation:se_24", tensor="norm.", source="NVIDIA/Megatron-LM#1446"),
    _wrong("SE-26", "C", "a compiled closure over the inner model", "synchronisation:se_26", source="pytorch/pytorch#109774"),
    _wrong("SE-28", "C", "one collective in a hundred loses a rank", "synchronisation:se_28", source="TrainCheck: pytorch-84803"),
    _wrong("SE-28-receiver", "C", "one in a hundred is not received", "synchronisation:se_28_receiver", source="TrainCheck: pytorch-96600"),
    _wrong("OWN-05", "C", "a tied matrix added under both names", "synchronisation:own_05", tensor="embedding.weight"),
    _wrong("OWN-06", "C", "the last rank's window ends early", "synchronisation:own_06"),
    _wrong("OWN-07", "C", "small tensors travel in sixteen bits", "synchronisation:own_07"),
)
D = (
    _wrong("SE-29", "D", "clipped by the norm of a shard", "precision:se_29", source="pytorch/pytorch#170862"),
    _wrong("SE-31", "D", "clipped after every micro-batch", "precision:se_31", source="huggingface/transformers#1563"),
    _wrong("SE-32", "D", "small tensors clipped on rank 0 alone", "precision:se_32", source="deepspeedai/DeepSpeed#1801"),
    _wrong("SE-35", "D", "an overflow is skipped by one rank alone", "precision:se_35", source="pytorch/pytorch#115710"),
    _wrong("SE-36", "D", "gradients added in bfloat16", "precision:se_36", quick=True, source="pytorch/pytorch#106395"),
    _wrong("SE-36-half", "D", "gradients added in float16", "precision:se_36_half", source="pytorch/pytorch#106395"),
    _wrong("SE-38", "D", "a master copy too coarse for its update", "precision:se_38", source="NVIDIA/Megatron-LM#5974"),
    _wrong("SE-38-half", "D", "half of the update is copied back", "precision:se_38_half", source="NVIDIA/Megatron-LM#5974"),
    _wrong("SYN-01", "D", "clipped before the mean over ranks", "precision:syn_01", source="synthetic"),
    _wrong("OWN-08", "D", "the clipping limit times W", "precision:own_08"),
    _wrong("OWN-09", "D", "clipped group by group", "precision:own_09"),
    _wrong("OWN-10", "D", "one rank decays its norms and biases", "precision:own_10"),
    _wrong("OWN-11", "D", "the second moment's memory follows W", "precision:own_11"),
)
E = (
    _wrong("SE-39", "E", "shards of unlike first weights", "construction:se_39", quick=True, source="pytorch/torchtitan#1777"),
    _wrong("SE-41", "E", "a tied matrix becomes two", "construction:se_41", source="facebookresearch/lingua#75"),
    _wrong(
        "SE-43",
        "E",
        "an optimizer of parameters that are gone",
        "construction:se_43",
        also=(REFUSED,),
        source="huggingface/accelerate#2665",
    ),
    _wrong("SE-45", "E", "the schedule steps W times an update", "construction:se_45", source="huggingface/accelerate#2926"),
    _wrong("OWN-12", "E", "a copy is trained, the original is updated", "construction:own_12", also=(REFUSED,)),
    _wrong("OWN-13", "E", "the ranks' schedules are a step apart", "construction:own_13"),
    _wrong("OWN-14", "E", "on many ranks a group never moves", "construction:own_14"),
)
F = (
    _wrong("SE-46", "F", "every epoch in the same order", "randomness:se_46", source="pytorch/pytorch#31771"),
    _wrong("SE-47", "F", "each rank shuffles by a seed of its own", "randomness:se_47", quick=True, source="NVlabs/LongLive#71"),
    _wrong("SE-49", "F", "every rank reads the same stream", "randomness:se_49", source="huggingface/datasets#5360"),
    _wrong("SE-52", "F", "padded samples counted twice in evaluation", "randomness:se_52", quick=True, source="roboflow/rf-detr#1507"),
    _wrong("SE-53", "F", "workers share one stream of noise", "randomness:se_53", source="pytorch/pytorch#5059"),
    _wrong(
        "SE-53-ranks", "F", "the ranks' workers share streams of noise", "randomness:se_53_ranks", source="facebookresearch/fairseq#1383"
    ),
    _wrong("SE-55", "F", "all ranks drop the same places", "randomness:se_55", source="huggingface/accelerate#236"),
    _wrong("SE-55-steps", "F", "every update drops the same places", "randomness:se_55_steps", source="ecmwf/anemoi-core#595"),
    _wrong("SE-56", "F", "rank 0's loss decides what is skipped", "randomness:se_56", source="ecmwf/WeatherGenerator#2724"),
    _wrong("SE-56-each", "F", "each rank skips by itself", "randomness:se_56_each", source="NVIDIA-NeMo/Automodel#2468"),
    _wrong("SE-56-zero", "F", "a rank leaves itself out", "randomness:se_56_zero", source="ecmwf/WeatherGenerator#2724"),
    _wrong("OWN-15", "F", "an epoch is padded to the ranks", "randomness:own_15"),
    _wrong("OWN-16", "F", "one rank's share is the whole evaluation", "randomness:own_16"),
    _wrong("OWN-17", "F", "evaluation leaves out what does not fill", "randomness:own_17"),
    _wrong("OWN-18", "F", "the same noise in every epoch", "randomness:own_18"),
    _wrong("OWN-19", "F", "the last rank drops what does not fill", "randomness:own_19"),
    _wrong("OWN-20", "F", "labels of neighbours on one rank", "randomness:own_20"),
    _wrong("OWN-21", "F", "the ledger is right, the samples are not", "randomness:own_21"),
)
G = (
    _wrong("SE-59", "G", "the epoch begins at zero again", "resuming:se_59", RESUME, quick=True, source="huggingface/accelerate#2016"),
    _wrong("SE-61", "G", "skipping draws from the restored stream", "resuming:se_61", RESUME, source="huggingface/transformers#46628"),
    _wrong("SE-62", "G", "updates taken for micro-batches", "resuming:se_62", RESUME, source="EleutherAI/gpt-neox#308"),
    _wrong("SE-64", "G", "the second resume of an epoch is wrong", "resuming:se_64", RESUME, source="KempnerInstitute/KempnerForge#57"),
    _wrong("SE-67", "G", "on other ranks other samples", "resuming:se_67", RESUME, source="huggingface/transformers#22580"),
    _wrong("OWN-23", "G", "one batch again", "resuming:own_23", RESUME),
    _wrong("OWN-24", "G", "the sampler runs ahead of training", "resuming:own_24", RESUME),
)
H = (
    _wrong("SE-68", "H", "rank 0's stream on every rank", "resuming:se_68", RESUME, source="NVIDIA/Megatron-LM#6858"),
    _wrong("SE-70", "H", "moments dropped in silence", "resuming:se_70", RESUME, source="KempnerInstitute/KempnerForge#115"),
    _wrong("SE-72", "H", "two tensors' moments change places", "resuming:se_72", RESUME, source="pytorch/pytorch#1489"),
    _wrong(
        "SE-74",
        "H",
        "a rank's rows never written",
        "resuming:se_74",
        RESUME,
        tensor="blocks.0.mlp_in.weight",
        source="deepspeedai/DeepSpeed#7546",
    ),
    _wrong(
        "SE-74-missing",
        "H",
        "a missing name passed over",
        "resuming:se_74_missing",
        RESUME,
        tensor="blocks.0.mlp_in.weight",
        source="deepspeedai/DeepSpeed#6691",
    ),
    _wrong("SE-76", "H", "weights rounded on load", "resuming:se_76", RESUME, source="NVIDIA/Megatron-LM#2789"),
    _wrong("SE-78", "H", "the schedule is one behind", "resuming:se_78", RESUME, source="Lightning-AI/pytorch-lightning#4655"),
    _wrong("SE-78-lost", "H", "the warm-up begins again", "resuming:se_78_lost", RESUME, source="Lightning-AI/pytorch-lightning#1772"),
    _wrong("SE-79", "H", "the average begins again", "resuming:se_79", RESUME, source="ultralytics/yolov5#310"),
    _wrong("SE-79-weights", "H", "training goes on from the average", "resuming:se_79_weights", RESUME, quick=True, source="ai2cm/ace#349"),
    _wrong(
        "SE-82",
        "H",
        "two matrices become one on load",
        "resuming:se_82",
        RESUME,
        tensor="output.weight",
        source="NVIDIA-NeMo/Automodel#2511",
    ),
    _wrong("SYN-02", "H", "running statistics not restored", "resuming:syn_02", RESUME, source="synthetic"),
    _wrong("OWN-22", "H", "the optimizer's count of steps is lost", "resuming:own_22", RESUME),
    _wrong("OWN-25", "H", "a buffer that no state_dict holds", "resuming:own_25", RESUME),
    _wrong("OWN-26", "H", "the groups' weight decay forgotten", "resuming:own_26", RESUME),
    _wrong("OWN-27", "H", "the weights of the save before", "resuming:own_27", RESUME),
)
CONTROLS = (
    _right("clean-decoder", "the trainer's own parts", "decoder:recipe", quick=True),
    _right("clean-auxiliary", "with an auxiliary loss", "decoder:auxiliary"),
    _right("clean-tabular", "BatchNorm, averaged weights, keyed noise", "tabular:recipe"),
    _right("right-ddp", "DDP, reduced once a window", "synchronisation:right", quick=True),
    _right("right-fsdp2", "FSDP2", "synchronisation:right_shards"),
    _right("right-branches", "a branch that some micro-batches use", "synchronisation:right_branches"),
    _right("right-contrastive", "a loss over the samples of all ranks", "coupled:right"),
    _right("right-norm", "BatchNorm over the samples of all ranks", "coupled:right_norm"),
    _right("right-skip", "overflow skipped by all", "precision:right_skip"),
    _right("right-guard", "a spike skipped by all", "randomness:right_guard"),
    _right("right-sampler", "own sampler", "randomness:right_sampler"),
    _right("right-workers", "own sampler, DataLoader with workers", "randomness:right_workers"),
    _right("right-loader", "own loader in the process", "randomness:right_loader"),
    _right("right-streams", "own random streams", "randomness:right_streams"),
    _right("right-evaluation", "evaluation on all ranks", "randomness:right_evaluation"),
    _right("right-everything", "all parts own", "resuming:right", also=(RESUME,)),
    _right("right-resume", "all parts own", "resuming:right", RESUME),
    _right("right-files", "own checkpoints", "resuming:right_files", RESUME),
    _right("right-files-tabular", "own checkpoints with averages and statistics", "resuming:right_tabular", RESUME),
    _right("right-files-streams", "own checkpoints and streams", "resuming:right_streams", RESUME),
    _right("right-files-untied", "own checkpoints of two equal matrices", "resuming:right_untied", RESUME),
    _right("clean-resume", "the trainer's own parts", "tabular:recipe", RESUME),
    _right("NC-01", "reduced after each micro-batch: slow and right", "synchronisation:nc_01", source="KellerJordan/modded-nanogpt#31"),
    _right("NC-02", "a wrong norm in the log", "precision:nc_02", source="radixark/miles_diffusion#35"),
    _right("NC-04", "each rank's mean, and all have as many tokens", "normalisation:nc_04", source="measured"),
    _right("NC-06", "key biases: Adam makes steps of pure noise", "construction:nc_06", world_sizes=(1, 2, 4), source="measured"),
)
MUTANTS: tuple[Case, ...] = (*A, *B, *C, *D, *E, *F, *G, *H)
CASES: tuple[Case, ...] = (*MUTANTS, *CONTROLS)
