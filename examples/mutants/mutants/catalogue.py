"""Every mutant and every control by name: what is wrong with it, where it is from, and which gate has to say so.

Ids SE-, SYN- and NC- are those of a catalogue of publicly reported cases, FU- further ones; titles are ours. Sources are threads in
public repositories; those of ids OWN- are ours.
Classes: A normalisation, B batch-coupled losses and statistics, C synchronisation, D clipping and precision, E construction, F data and
randomness, G resuming the data, H resuming the state; - for controls, in which nothing is wrong.
"""

from dataclasses import dataclass

GRADIENT, RESUME, REFUSED = "gradient_equivalence", "kill_and_resume", "refused"
_GATES = {"gradient": GRADIENT, "resume": RESUME, "refused": REFUSED}
WORLD_SIZES = (1, 2)
WIDER = dict.fromkeys(("NC-06", "FU-09", "FU-15"), (1, 2, 4))  # world sizes of some


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recipe, and what has to be said about it."""

    id: str
    fault: str  # class letter, "" for a control
    title: str
    recipe: str  # import path
    gate: str  # that has to see it; for a control: that has to pass
    also: tuple[str, ...]  # other gates that may rightly see it first
    kinds: tuple[str, ...]  # of its first divergence, see validation.diagnosis_kinds: any of these; () = whatever
    tensor: str  # part of the name that has to be said, "" = none
    source: str  # "" = ours
    world_sizes: tuple[int, ...]
    is_quick: bool  # in the sample that every test run makes

    @property
    def is_control(self) -> bool:
        """Whether there is nothing wrong with it."""
        return not self.fault


# id, with * in the quick sample | class | title | recipe | gate, others that may see it first | kinds | tensor | source
_TABLE = """
SE-01 | A | each micro-batch's mean, averaged | normalisation:se_01 | gradient | per_micro_batch |  | huggingface/transformers#34191
SE-01-loss | A | the loss is a mean | normalisation:se_01_loss | refused |  |  | huggingface/transformers#34191
SE-02* | A | tokens counted on each rank alone | normalisation:se_02 | gradient | per_rank |  | huggingface/transformers#34242
SE-04 | A | token means weighed by samples | normalisation:se_04 | gradient | per_micro_batch |  | verl-project/verl#5625
SE-04-loss | A | the same inside the loss | normalisation:se_04_loss | gradient+refused | every_size |  | verl-project/verl#5625
SE-05 | A | divided by the accumulation once more | normalisation:se_05 | gradient | factor |  | unslothai/unsloth-zoo#1023
SE-05-ranks | A | divided by the world size once more | normalisation:se_05_ranks | gradient | factor |  | unslothai/unsloth-zoo#1023
SE-08 | A | the auxiliary loss divided by W | normalisation:se_08 | gradient | per_rank |  | NVIDIA/Megatron-LM#3672
SYN-04 | A | every gradient one per cent too large | normalisation:syn_04 | gradient | factor |  | synthetic
OWN-01 | A | the last rank's loss scaled by two | normalisation:own_01 | gradient | per_rank |  |
OWN-02 | A | divided by the tokens of the window before | normalisation:own_02 | gradient | factor intermittent not_in_state |  |
OWN-03 | A | rank 0's tokens stand for everyone's | normalisation:own_03 | gradient | factor |  |
SE-10* | B | embeddings gathered without a gradient | coupled:se_10 | gradient | factor |  | lightly-ai/lightly#1977
SE-10-rows | B | the other ranks' views get no gradient | coupled:se_10_rows | gradient | per_rank |  | mlfoundations/open_clip#616
SE-10-local | B | the other ranks' samples are no negatives | coupled:se_10_local | gradient | per_rank |  | texttron/tevatron#30
SE-12 | B | a factor W for a gather that never was | coupled:se_12 | gradient | factor |  | lightonai/pylate#156
SE-13 | B | BatchNorm by each rank's own samples | coupled:se_13 | gradient | per_rank |  | pytorch/pytorch#62967
SE-13-buffers | B | running statistics drift apart | coupled:se_13_buffers | gradient | buffers |  | huggingface/pytorch-image-models#110
OWN-04 | B | targets right on rank 0 alone | coupled:own_04 | gradient | per_rank |  |
SE-15* | C | the last micro-batch is not reduced | synchronisation:se_15 | gradient | no_reduction |  | modelscope/FunASR#3472
SE-16 | C | moved after wrapping: stale hooks | synchronisation:se_16 | gradient | no_reduction |  | pytorch/pytorch#104336
SE-18 | C | one layer frozen while wrapped | synchronisation:se_18 | gradient | unreduced_tensors | blocks.1.mlp_out.weight | NVIDIA/apex#46
SE-19 | C | the loss goes around the wrapper | synchronisation:se_19 | gradient | no_reduction |  | TrainCheck
SE-21 | C | groups of one rank: nothing is shared | synchronisation:se_21 | gradient | no_reduction |  | verl-project/verl#7493
SE-23 | C | a branch of early micro-batches is not reduced | synchronisation:se_23 | gradient | unreduced_tensors |  | pytorch/pytorch#69031
SE-24 | C | one LayerNorm left out of the sum | synchronisation:se_24 | gradient | unreduced_tensors | norm. | NVIDIA/Megatron-LM#1446
SE-26 | C | a compiled closure over the inner model | synchronisation:se_26 | gradient | no_reduction |  | pytorch/pytorch#109774
SE-28 | C | one collective in a hundred loses a rank | synchronisation:se_28 | gradient | intermittent some_tensors |  | TrainCheck
SE-28-got | C | one in a hundred never comes | synchronisation:se_28_receiver | gradient | intermittent unreduced_tensors |  | TrainCheck
OWN-05 | C | a tied matrix added under both names | synchronisation:own_05 | gradient | some_tensors | embedding.weight |
OWN-06 | C | the last rank's window ends early | synchronisation:own_06 | gradient | samples padding |  |
OWN-07 | C | small tensors travel in sixteen bits | synchronisation:own_07 | gradient | precision some_tensors |  |
SE-29 | D | clipped by the norm of a shard | precision:se_29 | gradient | clipping |  | pytorch/pytorch#170862
SE-31 | D | clipped after every micro-batch | precision:se_31 | gradient | clipping per_micro_batch |  | huggingface/transformers#1563
SE-32 | D | small tensors clipped on rank 0 alone | precision:se_32 | gradient | clipping unreduced_tensors |  | deepspeedai/DeepSpeed#1801
SE-35 | D | an overflow is skipped by one rank alone | precision:se_35 | gradient | poison |  | pytorch/pytorch#115710
SE-36* | D | gradients added in bfloat16 | precision:se_36 | gradient | precision |  | pytorch/pytorch#106395
SE-36-half | D | gradients added in float16 | precision:se_36_half | gradient | precision |  | pytorch/pytorch#106395
SE-38 | D | a master copy too coarse for its update | precision:se_38 | gradient | update |  | NVIDIA/Megatron-LM#5974
SE-38-half | D | half of the update is copied back | precision:se_38_half | gradient | update |  | NVIDIA/Megatron-LM#5974
SYN-01 | D | clipped before the mean over ranks | precision:syn_01 | gradient | clipping per_rank |  | synthetic
OWN-08 | D | the clipping limit times W | precision:own_08 | gradient | clipping |  |
OWN-09 | D | clipped group by group | precision:own_09 | gradient | clipping |  |
OWN-10 | D | one rank decays its norms and biases | precision:own_10 | gradient | update |  |
OWN-11 | D | the second moment's memory follows W | precision:own_11 | gradient | update |  |
SE-39* | E | shards of unlike first weights | construction:se_39 | gradient | initial_weights |  | pytorch/torchtitan#1777
SE-41 | E | a tied matrix becomes two | construction:se_41 | gradient | some_tensors |  | facebookresearch/lingua#75
SE-43 | E | an optimizer of former parameters | construction:se_43 | gradient+refused | nothing_moves |  | huggingface/accelerate#2665
SE-45 | E | the schedule steps W times an update | construction:se_45 | gradient | rates |  | huggingface/accelerate#2926
OWN-12 | E | a copy is trained, the original is updated | construction:own_12 | gradient+refused | nothing_moves |  |
OWN-13 | E | the ranks' schedules are a step apart | construction:own_13 | gradient | rates |  |
OWN-14 | E | on many ranks a group never moves | construction:own_14 | gradient | rates still |  |
SE-46 | F | every epoch in the same order | randomness:se_46 | gradient | epoch_order |  | pytorch/pytorch#31771
SE-47* | F | each rank shuffles by a seed of its own | randomness:se_47 | gradient | rank_order |  | NVlabs/LongLive#71
SE-49 | F | every rank reads the same stream | randomness:se_49 | gradient | not_split |  | huggingface/datasets#5360
SE-52* | F | padded samples counted twice in evaluation | randomness:se_52 | gradient | evaluation |  | roboflow/rf-detr#1507
SE-53 | F | workers share one stream of noise | randomness:se_53 | gradient | streams |  | pytorch/pytorch#5059
SE-53-ranks | F | the ranks' workers share streams of noise | randomness:se_53_ranks | gradient | streams |  | facebookresearch/fairseq#1383
SE-55 | F | all ranks drop the same places | randomness:se_55 | gradient | streams |  | huggingface/accelerate#236
SE-55-steps | F | every update drops the same places | randomness:se_55_steps | gradient | streams |  | ecmwf/anemoi-core#595
SE-56 | F | rank 0's loss decides what is skipped | randomness:se_56 | gradient | poison |  | ecmwf/WeatherGenerator#2724
SE-56-each | F | each rank skips by itself | randomness:se_56_each | gradient | poison |  | NVIDIA-NeMo/Automodel#2468
SE-56-zero | F | a rank leaves itself out | randomness:se_56_zero | gradient | poison |  | ecmwf/WeatherGenerator#2724
OWN-15 | F | an epoch is padded to the ranks | randomness:own_15 | gradient | padding samples order |  |
OWN-16 | F | one rank's share is the whole evaluation | randomness:own_16 | gradient | evaluation |  |
OWN-17 | F | evaluation leaves out what does not fill | randomness:own_17 | gradient | evaluation |  |
OWN-18 | F | the same noise in every epoch | randomness:own_18 | gradient | streams content |  |
OWN-19 | F | the last rank drops what does not fill | randomness:own_19 | gradient | samples padding |  |
OWN-20 | F | labels of neighbours on one rank | randomness:own_20 | gradient | content |  |
OWN-21 | F | the ledger is right, the samples are not | randomness:own_21 | gradient | claims content |  |
SE-59* | G | the epoch begins at zero again | resuming:se_59 | resume | position |  | huggingface/accelerate#2016
SE-61 | G | skipping draws from it again | resuming:se_61 | resume | random_streams not_in_state |  | huggingface/transformers#46628
SE-62 | G | updates taken for micro-batches | resuming:se_62 | resume | position |  | EleutherAI/gpt-neox#308
SE-64 | G | the second resume of an epoch is wrong | resuming:se_64 | resume | position |  | KempnerInstitute/KempnerForge#57
SE-67 | G | on other ranks other samples | resuming:se_67 | resume | position |  | huggingface/transformers#22580
OWN-23 | G | one batch again | resuming:own_23 | resume | position |  |
OWN-24 | G | the sampler runs ahead of training | resuming:own_24 | resume | position |  |
SE-68 | H | rank 0's stream on every rank | resuming:se_68 | resume | random_streams |  | NVIDIA/Megatron-LM#6858
SE-70 | H | moments dropped in silence | resuming:se_70 | resume | moments_lost |  | KempnerInstitute/KempnerForge#115
SE-72 | H | two tensors' moments change places | resuming:se_72 | resume | moments_swapped |  | pytorch/pytorch#1489
SE-74 | H | rows never written | resuming:se_74 | resume | weights | blocks.0.mlp_in.weight | deepspeedai/DeepSpeed#7546
SE-74-missing | H | a name passed over | resuming:se_74_missing | resume | weights | blocks.0.mlp_in.weight | deepspeedai/DeepSpeed#6691
SE-76 | H | weights rounded on load | resuming:se_76 | resume | weights_rounded weights |  | NVIDIA/Megatron-LM#2789
SE-78 | H | the schedule is one behind | resuming:se_78 | resume | schedule |  | Lightning-AI/pytorch-lightning#4655
SE-78-lost | H | the warm-up begins again | resuming:se_78_lost | resume | schedule |  | Lightning-AI/pytorch-lightning#1772
SE-79 | H | the average begins again | resuming:se_79 | resume | averages |  | ultralytics/yolov5#310
SE-79-weights* | H | training goes on from the average | resuming:se_79_weights | resume | averages_as_weights |  | ai2cm/ace#349
SE-82 | H | two matrices become one on load | resuming:se_82 | resume | weights | output.weight | NVIDIA-NeMo/Automodel#2511
SYN-02 | H | running statistics not restored | resuming:syn_02 | resume | buffers |  | synthetic
OWN-22 | H | the optimizer's count of steps is lost | resuming:own_22 | resume | step_count |  |
OWN-25 | H | a buffer that no state_dict holds | resuming:own_25 | resume | buffers not_in_state |  |
OWN-26 | H | the groups' weight decay forgotten | resuming:own_26 | resume | settings |  |
OWN-27 | H | the weights of the save before | resuming:own_27 | resume | weights |  |
OWN-28 | A | a penalty that counts once a micro-batch | unseen:own_28 | refused |  |  |
OWN-29 | D | a decay added to the clipped gradient | unseen:own_29 | gradient | update |  |
OWN-30 | E | groups sorted by names that a wrapper changes | unseen:own_30 | gradient | update |  |
OWN-31 | F | samples augmented in place | unseen:own_31 | refused |  |  |
OWN-32 | F | two micro-batches in one buffer | unseen:own_32 | refused |  |  |
OWN-33 | A | samples cut short with padding | unseen:own_33 | gradient | per_rank |  |
OWN-34 | H | an average in an object, lost | unseen:own_34 | resume | averages |  |
OWN-35 | H | an average's count of updates, lost | unseen:own_35 | resume | averages | updates |
OWN-36 | C | an average moved once a rank | unseen:own_36 | gradient | averages |  |
OWN-37 | C | an average of the weights before the update | unseen:own_37 | gradient | averages |  |
OWN-38 | H | an average by a wrapper's names, lost | unseen:own_38 | resume | averages |  |
OWN-39 | H | an average in a list, lost | unseen:own_39 | resume | averages |  |
FU-01 | A | tokens counted, of which the first is no target | further:fu_01 | gradient | factor |  | huggingface/transformers#46204
FU-02 | A | a short window divided as a full one | further:fu_02 | gradient | factor |  | Lightning-AI/pytorch-lightning#19987
FU-03 | A | gradients cleared after every other update | further:fu_03 | gradient | leftover |  | pytorch/pytorch#47175
FU-04 | B | each rank's own quotient of sums | further:fu_04 | gradient | per_rank |  | microsoft/InnerEye-DeepLearning#504
FU-05 | B | experts balanced on each rank alone | further:fu_05 | gradient | per_rank |  | pytorch/torchtitan#4772
FU-06 | B | running statistics of rank 0's samples | further:fu_06 | gradient | buffers |  | mlcommons/training#289
FU-06-times | B | statistics moved once a rank | further:fu_06_times | gradient | buffers |  |
FU-07 | D | replicas in the norm once a rank | further:fu_07 | gradient | clipping |  | NVIDIA-NeMo/RL#3788
FU-08 | E | the schedule steps with micro-batches | further:fu_08 | gradient | rates |  | starVLA/starVLA#210
FU-08-ranks | E | a learning rate that grows with the ranks | further:fu_08_ranks | gradient | rates |  |
FU-09 | E | what does not divide is updated by nobody | further:fu_09 | gradient | still unreduced_tensors |  |
FU-10 | F | every loader worker reads the whole stream | further:fu_10 | gradient | not_split |  | huggingface/datasets#3423
FU-11 | G | an epoch that has just begun taken for done | further_resuming:fu_11 | resume | position |  | verl-project/verl#7401
FU-12 | G | a shuffle buffer is lost | further_resuming:fu_12 | resume | position |  | huggingface/datasets#7901
FU-13 | H | the loss scale begins anew | further_resuming:fu_13 | resume | loss_scale |  | huggingface/transformers#11663
FU-14 | H | the hooks' own average begins anew | further_resuming:fu_14 | resume | averages |  |
FU-15 | H | new ranks go on in others' streams | further_resuming:fu_15 | resume |  |  |
FU-16 | H | numpy's stream begins anew | further_resuming:fu_16 | resume | random_streams |  |
FU-17 | H | a count of updates since the last start | further_resuming:fu_17 | resume | not_in_state |  |
clean-decoder* | - | the trainer's own parts | decoder:recipe | gradient |  |  |
clean-auxiliary | - | with an auxiliary loss | decoder:auxiliary | gradient |  |  |
clean-tabular | - | BatchNorm, averaged weights, keyed noise | tabular:recipe | gradient |  |  |
right-ddp* | - | DDP, reduced once a window | synchronisation:right | gradient |  |  |
right-fsdp2 | - | FSDP2 | synchronisation:right_shards | gradient |  |  |
right-branches | - | a branch that some micro-batches use | synchronisation:right_branches | gradient |  |  |
right-contrastive | - | a loss over the samples of all ranks | coupled:right | gradient |  |  |
right-norm | - | BatchNorm over the samples of all ranks | coupled:right_norm | gradient |  |  |
right-skip | - | overflow skipped by all | precision:right_skip | gradient |  |  |
right-guard | - | a spike skipped by all | randomness:right_guard | gradient |  |  |
right-sampler | - | own sampler | randomness:right_sampler | gradient |  |  |
right-workers | - | own sampler, DataLoader with workers | randomness:right_workers | gradient |  |  |
right-loader | - | own loader in the process | randomness:right_loader | gradient |  |  |
right-streams | - | own random streams | randomness:right_streams | gradient |  |  |
right-evaluation | - | evaluation on all ranks | randomness:right_evaluation | gradient |  |  |
right-everything | - | all parts own | resuming:right | gradient |  |  |
right-resume | - | all parts own | resuming:right | resume |  |  |
right-files | - | own checkpoints | resuming:right_files | resume |  |  |
right-files-tabular | - | own checkpoints with averages and statistics | resuming:right_tabular | resume |  |  |
right-files-streams | - | own checkpoints and streams | resuming:right_streams | resume |  |  |
right-files-untied | - | own checkpoints of two equal matrices | resuming:right_untied | resume |  |  |
clean-resume | - | the trainer's own parts | tabular:recipe | resume |  |  |
right-tail | - | epochs that end in shorter updates | further:right_tail | gradient |  |  |
right-dice | - | a quotient of sums over all ranks | further:right_dice | gradient |  |  |
right-balance | - | experts balanced over all ranks | further:right_balance | gradient |  |  |
right-parts | - | each rank updates a part and sends it | further:right_parts | gradient |  |  |
right-stream | - | an iterable dataset, whose workers take turns | further:right_stream | gradient |  |  |
right-drawing | - | samples drawn with replacement | further:right_drawing | gradient |  |  |
right-buffer | - | a shuffle buffer, saved | further_resuming:right_buffer | resume |  |  |
right-scale | - | own loss scale, saved | further_resuming:right_scale | resume |  |  |
right-average | - | own average, saved | further_resuming:right_average | resume |  |  |
right-numpy | - | numpy's stream, saved by rank | further_resuming:right_drawing | resume |  |  |
right-unfreezing | - | a layer that learns later | further_resuming:right_unfreezing | resume |  |  |
right-trimmed | - | padding trimmed off | unseen:right_trimmed | gradient |  |  |
right-shadow | - | own average in an object | unseen:right_shadow | gradient |  |  |
right-shadow-resume | - | own average in an object, saved with its count | unseen:right_shadow | resume |  |  |
right-lazy | - | a table made at the first forward pass | unseen:right_lazy | gradient |  |  |
right-logging | - | averaged norms kept for a log | unseen:right_logging | resume |  |  |
NC-01 | - | reduced after each micro-batch: slow and right | synchronisation:nc_01 | gradient |  |  | KellerJordan/modded-nanogpt#31
NC-02 | - | a wrong norm in the log | precision:nc_02 | gradient |  |  | radixark/miles_diffusion#35
NC-04 | - | each rank's mean, and all have as many tokens | normalisation:nc_04 | gradient |  |  | measured
NC-06 | - | key biases: Adam makes steps of pure noise | construction:nc_06 | gradient |  |  | measured
"""


def _case(line: str) -> Case:
    marked, fault, title, recipe, gates, kinds, tensor, source, *_ = [*(part.strip() for part in line.split("|")), "", "", ""]
    id, (gate, *also) = marked.removesuffix("*"), (_GATES[name] for name in gates.split("+"))
    return Case(
        id=id, fault=fault.strip("-"), title=title, recipe=f"mutants.{recipe}", gate=gate, also=tuple(also), kinds=tuple(kinds.split()),
        tensor=tensor, source=source, world_sizes=WIDER.get(id, WORLD_SIZES), is_quick=marked.endswith("*"),
    )  # fmt: skip


CASES: tuple[Case, ...] = tuple(_case(line) for line in _TABLE.strip().splitlines())
MUTANTS: tuple[Case, ...] = tuple(case for case in CASES if not case.is_control)
CONTROLS: tuple[Case, ...] = tuple(case for case in CASES if case.is_control)
