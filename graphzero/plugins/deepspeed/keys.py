"""DeepSpeed's JSON, key by key: what becomes of each here.  A new key is a line in this table.

Facts are those of DeepSpeed 0.19.8 and of earlier releases (its ``runtime/config.py``, ``runtime/zero/config.py``,
``runtime/precision_config.py``); docs/from_deepspeed.md shows the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HONOURED = "honoured"
REPLACED = "replaced"
REFUSED = "error"
AUTO = "auto"

Idle = Callable[[Any], bool]


def idle_at(*values: Any) -> Idle:
    return lambda value: value is None or value in values


def always(value: Any) -> bool:
    return True


def is_disabled(section: Any) -> bool:
    """Return whether no "enabled" within a section is true, which is how DeepSpeed switches sections on."""
    if not isinstance(section, Mapping):
        return not section
    return not section.get("enabled") and all(is_disabled(x) for x in section.values() if isinstance(x, Mapping))


def idle_where(name: str, *values: Any) -> Idle:
    """Condition that a section has no effect: the key ``name`` in it has one of these values, or is missing."""
    return lambda section: (section.get(name) in (None, *values)) if isinstance(section, Mapping) else not section


OFF, ON = idle_at(False), idle_at(True)


@dataclass(frozen=True)
class KeyRule:
    """Treatment of one key, or of a section of which nothing further is read.

    path: names joined by dots.
    way: HONOURED, text says where it lands; REPLACED, results are the same without it, text says what does its work
    here; REFUSED, results would be others without it, text says what to do.
    is_idle: whether a value asks for nothing, so that nothing is said of it.
    auto: where the Hugging Face Trainer has the value of "auto" from; "" where it is computed here.
    holds: the names in a section that counts as a whole; () for any.
    """

    path: str
    way: str
    text: str
    is_idle: Idle = idle_at()
    auto: str | None = None
    holds: tuple[str, ...] = ()


def _honoured(path: str, text: str, auto: str | None = None) -> KeyRule:
    return KeyRule(path, HONOURED, text, always, auto)


def _replaced(path: str, text: str, is_idle: Idle = OFF, auto: str | None = None) -> KeyRule:
    return KeyRule(path, REPLACED, text, is_idle, auto)


def _refused(path: str, text: str, is_idle: Idle = OFF) -> KeyRule:
    return KeyRule(path, REFUSED, text, is_idle)


def _section(path: str, way: str, text: str, is_idle: Idle = is_disabled, holds: str = "") -> KeyRule:
    """A section that counts as a whole.  holds: its names, apart by spaces."""
    return KeyRule(path, way, text, is_idle, holds=tuple(holds.split()))


_SCALE = "enable_amp({}=...)"
_BATCH = "the batch: checked, or computed from the other two and the data ranks"
_OFFLOADED = (
    "enable_offload() for device cpu, enable_offload(path=nvme_path) for nvme; states are streamed and stepped on the "
    "device, whatever the other names say of how"
)
_NO_OFFLOAD = (
    "parameters stay on the device: set_memory_budget(bytes), stage 3 and set_activation_memory say before the first "
    "step whether it fits"
)
_ONE_COPY = "masters and states are float32 here; take it out, or give the optimizer a 16-bit model without enable_amp"
_ROUNDED = (
    "masters and states are float32 here; take it out, and for both in 16 bit train a bfloat16 model with "
    "enable_amp(stochastic_rounding=True)"
)
_YOUR_LOOP = "your own loop, which has the loss, graph.grad_norm and the rates"
_GATHERS = "set_memory_budget(bytes): what stays gathered is what fits"
_OWN_CODE = "set_activation_memory('checkpoint' or bytes); code of deepspeed.checkpointing has to leave the model"
_ON_HOST = (
    "set_activation_memory('checkpoint'), and enable_offload(activations=bytes) for what of it may be on the device; "
    "code of deepspeed.checkpointing has to leave the model"
)
_NOT_HERE = "there is none here, and the model would compute something else; take it out"
_OFFLOAD = (
    "device nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline pipeline_read pipeline_write fast_init "
    "ratio super_offload cpuadam_cores_perc"
)
_FLOPS = "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"
_COMET = "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode"
_MEASURES = "graph.plan says bytes before a step, gz.testing.measure_step measures them"

KEYS = (
    _honoured("train_batch_size", _BATCH, auto=""),
    _honoured("train_micro_batch_size_per_gpu", _BATCH, auto=""),
    _honoured("gradient_accumulation_steps", "set_gradient_accumulation_steps(k)", auto=""),
    _refused("managed_gradient_accumulation",
             "a call of the Graph is a whole step, of all micro-batches; take it out", ON),
    _honoured("gradient_clipping", "add_optimizer(clip_grad_norm=...), by config.deepspeed.optimizer_arguments(...)",
              auto="TrainingArguments.max_grad_norm, by default 1.0"),
    # ---- optimizer and schedule; their parameters are in ``optimizers`` and ``schedules``
    _honoured("optimizer.type", "config.deepspeed.optimizer_arguments(...): torch's of that name"),
    _honoured("optimizer.params", "config.deepspeed.optimizer_arguments(...), with DeepSpeed's defaults"),
    _replaced("optimizer.legacy_fusion", "optimizers are those of torch"),
    _honoured("scheduler.type", "config.deepspeed.optimizer_arguments(...): DeepSpeed's formula, or torch's class"),
    _honoured("scheduler.params", "config.deepspeed.optimizer_arguments(...), with DeepSpeed's defaults"),
    # ---- precision
    _honoured("fp16.enabled", "enable_amp(dtype=torch.float16)", auto="TrainingArguments.fp16, by default false"),
    _honoured("fp16.auto_cast", "build runs under torch.autocast, which casts inputs where ops read them", auto=""),
    _honoured("fp16.loss_scale", "0 is dynamic; another one stays as it is, and steps that overflow are skipped"),
    _honoured("fp16.initial_scale_power", _SCALE.format("init_scale")),
    _honoured("fp16.loss_scale_window", _SCALE.format("growth_interval")),
    _honoured("fp16.hysteresis", _SCALE.format("hysteresis")),
    _honoured("fp16.consecutive_hysteresis", _SCALE.format("consecutive_hysteresis")),
    _honoured("fp16.min_loss_scale", _SCALE.format("min_scale")),
    _replaced("fp16.fused_mode", "optimizers are those of torch", always),
    _refused("fp16.fp16_master_weights_and_grads", _ONE_COPY),
    _honoured("bf16.enabled", "enable_amp(dtype=torch.bfloat16)", auto="TrainingArguments.bf16, by default false"),
    _replaced("bf16.immediate_grad_update", "gradients are added up in float32 where they are made"),
    _refused("bf16.check_grad_overflow",
             "a step whose gradients are not finite is not skipped under bfloat16; write false, or take fp16"),
    _refused("bf16.bf16_master_weights_and_grads", _ROUNDED),
    _refused("bf16.bf16_optimizer_states", _ROUNDED),
    _honoured("torch_autocast.enabled", "enable_amp(dtype=...)"),
    _honoured("torch_autocast.dtype", "enable_amp(dtype=...)"),
    _replaced("torch_autocast.lower_precision_safe_modules", "all floating parameters are cast; norms too", idle_at()),
    _section("amp", REFUSED, "Apex has its own rules for casts; write fp16 or bf16 instead"),
    _honoured("communication_data_type", _SCALE.format("reduce_dtype")),
    _refused("fp32_allreduce", 'communication_data_type "fp32" is its name now; write that'),
    _replaced("seq_parallel_communication_data_type", "sums run in the dtype of what is added", idle_at("fp32")),
    _replaced(
        "data_types.grad_accum_dtype", "gradients of micro-batches are added up in float32", idle_at("fp32", "float32")
    ),
    _refused("data_types.param_dtype",
             "parameters keep the dtype that the model has; cast the model, or take fp16 or bf16, and take this out",
             idle_at()),
    _refused("data_types.buffer_dtype", "buffers keep the dtype that the model has; cast them yourself", idle_at()),
    _refused("data_types.keep_in_fp32_modules",
             "torch.autocast(enabled=False) around these modules does it; take this out", idle_at(AUTO)),
    # ---- gradients
    _replaced("prescale_gradients", "losses are divided by the number of the whole batch before backward, always"),
    _replaced("gradient_predivide_factor", "as prescale_gradients", idle_at(1)),
    _refused("gradient_allreduce_op",
             "means are means of the whole batch here; to add up, multiply the loss in build", idle_at("mean")),
    _replaced("sparse_gradients", "gradients of embeddings are dense"),
    _replaced("disable_allgather", "enable_zero chooses collectives"),
    # ---- ZeRO
    _honoured("zero_optimization.stage", "enable_zero(stage=...); 0 is without it"),
    _honoured("zero_optimization.reduce_bucket_size",
              "elements; an upper limit, which config.bucket_bytes keeps: its default is 4 MiB at most", auto=""),
    _honoured("zero_optimization.allgather_bucket_size", "as reduce_bucket_size; the smaller one counts", auto=""),
    _replaced("zero_optimization.overlap_comm", "collectives always overlap with compute", ON),
    _replaced("zero_optimization.reduce_scatter", "gradients of split states are always reduce-scattered", ON),
    _replaced("zero_optimization.allgather_partitions", "pieces are always all-gathered", ON),
    _replaced("zero_optimization.contiguous_gradients", "buckets are always contiguous", ON),
    _replaced("zero_optimization.round_robin_gradients", "every parameter is cut over all ranks"),
    _replaced("zero_optimization.use_multi_rank_bucket_allreduce", "gradients are reduce-scattered in buckets", ON),
    _replaced("zero_optimization.parameter_alignment", "the dim to cut is that of least padding"),
    _replaced("zero_optimization.compute_grad_norm", "only clipping computes a norm, always", always),
    _replaced("zero_optimization.load_from_fp32_weights", "checkpoints hold float32 masters, always", ON),
    _replaced("zero_optimization.elastic_checkpoint", "gz.load reads checkpoints of any number of ranks"),
    _section("zero_optimization.offload_optimizer", HONOURED, _OFFLOADED, idle_where("device", "none"), _OFFLOAD),
    _section("zero_optimization.offload_param", REPLACED, _NO_OFFLOAD, idle_where("device", "none"), _OFFLOAD),
    _honoured("zero_optimization.cpu_offload", "enable_offload(), as offload_optimizer with device cpu"),
    _replaced("zero_optimization.cpu_offload_param", _NO_OFFLOAD),
    _replaced("zero_optimization.cpu_offload_use_pin_memory", "with a GPU, host memory is always pinned", always),
    _section("zero_optimization.zenflow", REFUSED, "updates would be late; take it out", lambda value: value is None),
    _replaced(
        "zero_optimization.sub_group_size", "set_optimizer_in_backward(): each parameter steps by itself", idle_at()
    ),
    _replaced("zero_optimization.stage3_prefetch_bucket_size", "gathers start ahead by themselves", idle_at(), auto=""),
    _honoured("zero_optimization.stage3_param_persistence_threshold",
              "enable_zero(shard_min_size=...), in elements per rank; their states stay whole too", auto=""),
    _replaced("zero_optimization.stage3_model_persistence_threshold", _GATHERS, idle_at()),
    _replaced("zero_optimization.stage3_max_live_parameters", _GATHERS, idle_at()),
    _replaced("zero_optimization.stage3_max_reuse_distance", _GATHERS, idle_at()),
    _replaced("zero_optimization.stage3_gather_16bit_weights_on_model_save",
              "gz.save_pretrained, or graph.full_state_dict(): whole float32 weights at every stage"),
    _replaced("zero_optimization.stage3_module_granularity_threshold", "gathers are joined in buckets", idle_at(0)),
    _replaced("zero_optimization.stage3_use_all_reduce_for_fetch_params", "pieces are always all-gathered"),
    _replaced("zero_optimization.stage3_allgather_sequential", "config.bucket_bytes = 1: one gather a parameter"),
    _replaced("zero_optimization.stage3_partition_stream_chunk_size", "gz.materialize fills shards", idle_at(0)),
    _replaced("zero_optimization.ignore_unused_parameters", "parameters without a gradient stay as they are", ON),
    _replaced("zero_optimization.legacy_stage1", "there is one stage 1"),
    _replaced(
        "zero_optimization.zero_hpz_partition_size",
        "the pass examples/passes/node_local_copy.py on a placement of two data axes, names=('dp_node', 'dp_gpu')",
        idle_at(0, 1),
    ),
    _refused("zero_optimization.zero_quantized_weights",
             "no setting quantizes what is gathered; write false, and add the pass examples/passes/int8_gathers.py"),
    _refused("zero_optimization.zero_quantized_nontrainable_weights", "nothing is quantized; write false"),
    _refused("zero_optimization.zero_quantized_gradients", "nothing is quantized on its way; write false"),
    _section("zero_optimization.zeropp_loco_param", REFUSED, "nothing is quantized on its way; take it out"),
    _replaced("zero_optimization.mics_shard_size",
              "a placement of two data axes, names=('dp_replicate', 'dp_shard'), and enable_zero(axis='dp_shard')",
              idle_at(-1)),
    _replaced("zero_optimization.mics_hierarchical_params_gather", "as mics_shard_size"),
    _replaced("zero_optimization.memory_efficient_linear", "backward is in the program", always),
    _replaced("zero_optimization.pipeline_loading_checkpoint", "gz.load reads what a rank holds"),
    _replaced("zero_optimization.override_module_apply", "gz.materialize initialises shards", ON),
    _replaced("zero_optimization.log_trace_cache_warnings", "a step is one program, printed by str(graph.program)"),
    _replaced("zero_optimization.enable_sanity_checks", "gz.check(graph, *batch)"),
    _replaced("zero_optimization.save_muon_momentum_buffer_in_memory", "enable_offload() streams all states alike"),
    _section("zero_optimization.leaf_module", REPLACED, "a step is one program, without hooks of modules", always),
    _replaced("zero_allow_untested_optimizer", "any optimizer whose step traces", always),
    _replaced("zero_force_ds_cpu_optimizer", "states on the host are stepped on the device, by any optimizer", always),
    # ---- activations
    _replaced("activation_checkpointing.partition_activations", _OWN_CODE),
    _replaced("activation_checkpointing.cpu_checkpointing", _ON_HOST),
    _replaced("activation_checkpointing.contiguous_memory_optimization", _OWN_CODE),
    _replaced("activation_checkpointing.number_checkpoints", _OWN_CODE),
    _replaced("activation_checkpointing.synchronize_checkpoint_boundary", _OWN_CODE),
    _replaced("activation_checkpointing.profile", _OWN_CODE),
    # ---- checkpoints and data
    _replaced("checkpoint.tag_validation", "gz.save: ranks agree on the name, always", idle_at()),
    _replaced("checkpoint.load_universal", "gz.load reads checkpoints of any stage and number of ranks"),
    _replaced("checkpoint.use_node_local_storage", "gz.save takes a path that all hosts share"),
    _section("checkpoint.parallel_write", REPLACED, "gz.save: each rank writes what it holds", always),
    _replaced("checkpoint.checkpoint_serialization", "gz.save writes safetensors files", always),
    _section("checkpoint.writer", REPLACED, "gz.save(asynchronous=True)", idle_at({})),
    _section("nebula", REPLACED, "gz.save(asynchronous=True)"),
    _section("datastates_ckpt", REPLACED, "gz.save(asynchronous=True)", idle_at(False)),
    _replaced("dataloader_drop_last", "DataLoader(drop_last=True): the loader is yours"),
    # ---- what is shown
    _replaced("steps_per_print", _YOUR_LOOP, always),
    _replaced("wall_clock_breakdown", "gz.trace(graph, *batch), or graphzero trace"),
    _replaced("memory_breakdown", _MEASURES),
    _replaced("dump_state", "print(graph): settings, parameters and program"),
    _replaced("log_level", "Python's logging, logger 'graphzero'", idle_at()),
    _section("flops_profiler", REPLACED, "torch.utils.flop_counter around an eager step", holds=_FLOPS),
    _section("tensorboard", REPLACED, "torch.utils.tensorboard.SummaryWriter, see docs/trace.md",
             holds="enabled output_path job_name"),
    _section("wandb", REPLACED, _YOUR_LOOP, holds="enabled group team project"),
    _section("csv_monitor", REPLACED, _YOUR_LOOP, holds="enabled output_path job_name"),
    _section("comet", REPLACED, _YOUR_LOOP, holds=_COMET),
    _section("comms_logger", REPLACED, "graph.plan.collectives: every transfer of a step, with bytes",
             holds="enabled prof_all prof_ops verbose debug"),
    _section("timers", REPLACED, "torch.profiler around a call", idle_at({})),
    _replaced("disable_python_gc", "gc.disable() in your script"),
    _replaced("vocabulary_size", "DeepSpeed only warns by it", always),
    # ---- how it runs
    _section("compile", REPLACED, "set_executor('inductor')", idle_where("deepcompile", False)),
    _replaced("graph_harvesting", "set_cuda_graph()"),
    _section("autotuning", REPLACED, "enable_zero(stage='auto') and set_memory_budget"),
    _section("aio", REPLACED, "the system reads and writes the files of enable_offload(path=...)", always),
    _section("elasticity", REFUSED, "the batch would follow from the ranks; write the batch sizes, and take it out"),
    _refused("sequence_parallel_size",
             "a placement with a second axis, and set_input for its split: docs/sequences.md; take it out",
             idle_at(1)),
    _section("tensor_parallel", REFUSED,
             "a placement with a second axis, and the splits of the weights: docs/tensor_parallel.md; take it out",
             idle_where("autotp_size", 0, 1)),
    _section("pipeline", REFUSED,
             "a placement with an axis pp, set_stage and set_pipeline: docs/pipelines.md; take it out", idle_at({})),
    _section("expert_parallel", REFUSED, "a split of the experts' weights: docs/experts.md; take it out"),
    _replaced("use_data_before_expert_parallelism", "names of a placement's axes say their order"),
    # ---- what would compute something else
    _section("compression_training", REFUSED, _NOT_HERE),
    _section("weight_quantization", REFUSED, _NOT_HERE, idle_at({})),
    _section("quantize_training", REFUSED, _NOT_HERE),
    _section("eigenvalue", REFUSED, _NOT_HERE),
    _section("sparse_attention", REFUSED, _NOT_HERE, idle_at({})),
    _section("progressive_layer_drop", REFUSED, _NOT_HERE),
    _section("hybrid_engine", REFUSED, "a Graph without backward() generates with the same weights; take it out"),
    _section("curriculum_learning", REFUSED, "use your own sampler for the order of samples; take it out"),
    _section("data_efficiency", REFUSED, "use your own sampler for the order of samples; take it out"),
)  # fmt: skip

ALIASES = {  # other names of one key, of earlier releases or of its own classes
    "bfloat16": "bf16",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.model_persistence_threshold": "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "allgather_size": "zero_optimization.allgather_bucket_size",
}
