"""What becomes of DeepSpeed's JSON: every key of the table, the batch, settings, and what is said of the rest."""

import json
import warnings

import pytest
import torch

import graphzero as gz
from graphzero.config import AmpSettings, OffloadSettings, ZeroSettings
from graphzero.plugins.deepspeed.keys import ALIASES, AUTO, HONOURED, KEYS, REFUSED, REPLACED

TWO = gz.placement("cpu", range(2), virtual=True)
LEAST = {"train_batch_size": 16, "gradient_clipping": 0}
ACTIVE = (True, False, 7, "other", {"enabled": True}, {"device": "cpu"}, {"deepcompile": True}, {"autotp_size": 2})


def nested(path, value):
    """The JSON in which a value stands at a path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def read(document, placement=TWO):
    """The configuration, and the lines of its one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = gz.GraphConfig.from_deepspeed(document, placement)
    assert len(caught) <= 1
    return config, [str(found.message) for found in caught]


def refusal(document, placement=TWO):
    with pytest.raises(gz.ConfigError) as caught:
        read(document, placement)
    return str(caught.value)


# ---- the table


def test_every_key_stands_once_and_says_what_becomes_of_it():
    paths = [key.path for key in KEYS]
    assert len(paths) == len(set(paths)) and not set(paths) & set(ALIASES)
    assert all(key.way in (HONOURED, REPLACED, REFUSED) and key.text for key in KEYS)
    assert {path.rpartition(".")[0] or path for path in ALIASES.values()} <= {p.rpartition(".")[0] for p in paths} | {
        "bf16"
    }


@pytest.mark.parametrize("key", [key for key in KEYS if key.way != HONOURED], ids=lambda key: key.path)
def test_what_is_not_honoured_is_named_with_what_to_do_unless_it_asks_for_nothing(key):
    at_work = next((value for value in ACTIVE if not key.is_idle(value)), None)
    idle = next((value for value in (False, True, 0, 1, -1, {}, "fp32", "mean") if key.is_idle(value)), None)
    if idle is not None or key.is_idle(None):
        _, said = read(LEAST | nested(key.path, idle))
        assert said == []
    if at_work is None:
        return
    document = LEAST | nested(key.path, at_work)
    if key.way == REFUSED:
        assert f"{key.path}: {key.text}" in refusal(document)
    else:
        _, (said,) = read(document)
        assert said.splitlines()[1:] == [f"  {key.path}: {key.text}"]


@pytest.mark.parametrize("key", [key for key in KEYS if key.auto], ids=lambda key: key.path)
def test_an_auto_that_the_trainer_fills_in_is_refused_with_whence_it_takes_the_value(key):
    assert f'{key.path}: "auto", which the Hugging Face Trainer fills in from {key.auto}' in refusal(
        LEAST | nested(key.path, AUTO)
    )


@pytest.mark.parametrize("key", [key for key in KEYS if key.auto == ""], ids=lambda key: key.path)
def test_an_auto_that_can_be_computed_is_as_if_it_was_not_given(key):
    least = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0}
    least = LEAST if key.path == "train_micro_batch_size_per_gpu" else least
    config, said = read(least | nested(key.path, AUTO))
    assert config.settings == read(least)[0].settings and said == []


def test_all_that_is_wrong_with_keys_is_said_at_once_with_the_nearest_known():
    said = refusal(
        LEAST
        | {
            "gradient_clippping": 1.0,
            "zero_allow_untrained_optimizer": True,
            "zero_optimization": {"stage": "auto", "overlap_com": True, "zero_quantized_weights": True},
            "fp16": True,
            "wandb": {"enabeld": True},
            "nothing_of_the_kind": 1,
        }
    )
    lines = [line.strip() for line in said.splitlines()]
    assert lines[0] == "the DeepSpeed configuration:"
    assert set(lines[1:]) == {
        "gradient_clippping: DeepSpeed has no such key; did you mean gradient_clipping?",
        "zero_allow_untrained_optimizer: DeepSpeed has no such key; did you mean zero_allow_untested_optimizer?",
        "zero_optimization.overlap_com: DeepSpeed has no such key; did you mean zero_optimization.overlap_comm?",
        "fp16: True, but it is a section; write {...}",
        "wandb.enabeld: DeepSpeed has no such key; did you mean wandb.enabled?",
        "nothing_of_the_kind: DeepSpeed has no such key",
        'zero_optimization.stage: "auto", which DeepSpeed\'s integrations do not fill in; give a value, or take it out',
        "zero_optimization.zero_quantized_weights: no setting quantizes what is gathered; write false, and add the "
        "pass examples/passes/int8_gathers.py",
    }


def test_one_warning_names_all_that_is_done_otherwise():
    _, (said,) = read(
        {
            "train_batch_size": 4,
            "wall_clock_breakdown": True,
            "zero_optimization": {"offload_param": {"device": "cpu"}},
        }
    )
    first, *rest = said.splitlines()
    assert first == "the DeepSpeed configuration: these keys are replaced here"
    assert [line.split(":")[0].strip() for line in rest] == [
        "wall_clock_breakdown",
        "zero_optimization.offload_param",
        "gradient_clipping, which is not given",
    ]


def test_a_whole_json_as_tutorials_have_it():
    json = {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "fp16": {
            "enabled": True, "fp16_master_weights_and_grads": False, "loss_scale": 0, "loss_scale_window": 500,
            "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 2, "allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000, "overlap_comm": True, "contiguous_gradients": True, "cpu_offload": False,
        },
    }  # fmt: skip
    config, said = read(json)
    assert not said  # nothing of it, how often a loop prints included, changes what is computed
    assert config.zero.stage == 2 and config.amp == amp(init_scale=2.0**15, growth_interval=500)
    assert config.deepspeed.gradient_clipping == 1.0 and config.deepspeed.batch_per_rank == 8


def test_a_template_of_the_trainer_says_at_once_what_to_fill_in():
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    zero = {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "none", "pin_memory": True},
    }  # fmt: skip
    template = auto | {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "zero_optimization": zero}
    said = refusal(template)
    assert [line.split(":")[0].strip() for line in said.splitlines()[1:]] == ["bf16.enabled", "gradient_clipping"]
    filled = {"bf16": {"enabled": True}, "gradient_clipping": 1.0}
    assert "per_device_train_batch_size" in refusal(template | filled)
    config, (said,) = read(template | filled | {"train_micro_batch_size_per_gpu": 4})
    assert config.deepspeed.train_batch_size == 8 and config.zero.shard_min_size == 1
    assert [line.split(":")[0].strip().partition(".")[2] for line in said.splitlines()[1:]] == [
        "sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save",
    ]  # fmt: skip


def test_a_file_is_read_as_its_dict_and_a_wrong_one_is_named(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(LEAST | {"zero_optimization": {"stage": 3}}))
    assert read(str(path))[0].settings == read(path)[0].settings
    assert read(path)[0].zero.stage == 3
    assert "cannot read it" in refusal(tmp_path / "none.json")
    path.write_text('{"train_batch_size": 16, /* all */ }')
    assert "it is not JSON" in refusal(path) and "comments" in refusal(path)
    path.write_text('{"train_batch_size": 16, "train_batch_size": 8}')
    assert "'train_batch_size' occurs twice" in refusal(path)
    path.write_text("[1]")
    assert "ds.json holds a list" in refusal(path)
    assert "give the path" in refusal(3)


# ---- the batch

FOUR_BY_TWO = gz.placement("cpu", [[0, 1], [2, 3], [4, 5], [6, 7]], virtual=True)  # dp, tp


@pytest.mark.parametrize(
    "given, ranks, found",
    [
        ((16, 2, 4), TWO, (16, 2, 4)),
        ((16, 2, None), TWO, (16, 2, 4)),
        ((16, None, 4), TWO, (16, 2, 4)),
        ((None, 2, 4), TWO, (16, 2, 4)),
        ((16, None, None), TWO, (16, 8, 1)),
        ((None, 2, None), TWO, (4, 2, 1)),
        (("auto", 2.0, "auto"), TWO, (4, 2, 1)),
        ((16, 1, None), FOUR_BY_TWO, (16, 1, 4)),
    ],
)
def test_a_batch_is_the_product_and_what_is_missing_is_computed(given, ranks, found):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    document = {name: value for name, value in zip(names, given, strict=True) if value is not None}
    config, _ = read(document | {"gradient_clipping": 0}, ranks)
    said = config.deepspeed
    assert (said.train_batch_size, said.micro_batch_size, said.gradient_accumulation_steps) == found
    assert config.gradient_accumulation_steps == found[2] and said.batch_per_rank == found[1] * found[2]


@pytest.mark.parametrize(
    "given, parts",
    [
        ((16, 3, 2), ("train_batch_size 16 is not", "3 * ", "2 * 2 data ranks = 12")),
        ((15, None, None), ("15 does not divide by 2 data ranks = 2",)),
        ((16, 3, None), ("16 does not divide by", "3 * 2 data ranks = 6")),
        ((16, None, 3), ("16 does not divide by", "3 * 2 data ranks = 6")),
        ((2, 2, None), ("2 does not divide by", "2 * 2 data ranks = 4")),
        ((None, None, 4), ("give train_batch_size or train_micro_batch_size_per_gpu", "per_device_train_batch_size")),
        ((0, None, None), ("train_batch_size: 0; write a number, 1 or more",)),
        ((2.5, None, None), ("write a whole number",)),
        (("many", None, None), ("write a number",)),
    ],
)
def test_numbers_that_contradict_each_other_are_told(given, parts):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    said = refusal({name: value for name, value in zip(names, given, strict=True) if value is not None})
    assert all(part in said for part in parts), said


# ---- settings


def amp(**told):
    return AmpSettings(torch.float16, **{"growth_interval": 1000, "hysteresis": 2, **told})


@pytest.mark.parametrize(
    "given, name, found",
    [
        ({}, "zero", ZeroSettings()),
        ({"zero_optimization": {"stage": 0}}, "zero", ZeroSettings()),
        ({"zero_optimization": True}, "zero", ZeroSettings(1, ("dp",))),
        ({"zero_optimization": {"stage": 2}}, "zero", ZeroSettings(2, ("dp",))),
        (
            {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000}},
            "zero",
            ZeroSettings(3, ("dp",), shard_min_size=501),
        ),
        ({"zero_optimization": {"stage": 3, "param_persistence_threshold": 0}}, "zero", ZeroSettings(3, ("dp",))),
        ({}, "amp", AmpSettings()),
        ({"fp16": {"enabled": True}}, "amp", amp()),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 9, "min_loss_scale": 4}},
            "amp",
            amp(init_scale=256.0, growth_interval=9, min_scale=4.0),
        ),
        ({"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 3}}, "amp", amp(hysteresis=3)),
        (
            {"fp16": {"enabled": True, "consecutive_hysteresis": True, "auto_cast": True}},
            "amp",
            amp(consecutive_hysteresis=True),
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 128}},
            "amp",
            amp(init_scale=128.0, min_scale=128.0, growth_interval=2**31 - 1, hysteresis=1),
        ),
        (
            {"fp16": {"enabled": True}, "communication_data_type": "fp32"},
            "amp",
            amp(reduce_dtype=torch.float32),
        ),
        ({"bf16": {"enabled": True}}, "amp", AmpSettings(torch.bfloat16)),
        ({"bfloat16": {"enabled": True}, "fp16": {"enabled": False}}, "amp", AmpSettings(torch.bfloat16)),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, "amp", AmpSettings(torch.bfloat16)),
        ({"communication_data_type": "fp32"}, "amp", AmpSettings()),
        ({}, "offload", OffloadSettings()),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3}}},
            "offload",
            OffloadSettings(True),
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}},
            "offload",
            OffloadSettings(True, "/local_nvme"),
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, "offload", OffloadSettings()),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "offload", OffloadSettings(True)),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}, "bucket_bytes", None),
        ({"zero_optimization": {"reduce_bucket_size": 5e4, "allgather_bucket_size": 2e4}}, "bucket_bytes", 80_000),
        ({"zero_optimization": {"reduce_bucket_size": 100}, "bf16": {"enabled": True}}, "bucket_bytes", 200),
    ],
)  # fmt: skip
def test_values_land_in_settings(given, name, found):
    config, _ = read(LEAST | given)
    assert getattr(config, name) == found


@pytest.mark.parametrize(
    "given, part",
    [
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            'device "nvme" needs nvme_path, the folder in which states are to be',
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "disk"}}},
            'its device is "none", "cpu" or "nvme"',
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4; the stages are 0, 1, 2 and 3"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled: 1; write true or false"),
        ({"communication_data_type": "fp16"}, "without fp16 or bf16 gradients are reduced in float32"),
        ({"fp16": {"enabled": True}, "communication_data_type": "int8"}, "write fp16, bf16 or fp32"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype: None; write bfloat16 or float16"),
        ({"gradient_clipping": -1}, "gradient_clipping: -1; write a number, 0 or more"),
        ({"optimizer": {"type": "AdamW", "params": 3}}, "optimizer.params: 3; it is a section"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}},
            "optimizer.params.lr: '1e-4'; write the number, without quotes: 1e-4",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, "0.99"]}}},
            "optimizer.params.betas: [0.9, '0.99']; write the number, without quotes: 0.99",
        ),
        ({"prefetch_bucket_size": 1}, "did you mean zero_optimization.stage3_prefetch_bucket_size?"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "occurs twice, under its earlier name"),
    ],
)
def test_values_without_a_meaning_are_refused(given, part):
    assert part in refusal(LEAST | given)


def test_a_graph_takes_a_copy_of_the_settings_and_their_ranks():
    class Double(gz.Graph):
        def build(self, x):
            return 2 * x

    config, _ = read(LEAST | {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}})
    graph = Double(config=config)
    assert graph.placement == TWO and graph.config.settings == config.settings
    assert graph.config.deepspeed.batch_per_rank == 8
    config.enable_zero(stage=3)
    assert graph.config.zero.stage == 2
    with pytest.raises(gz.ConfigError, match="the Graph is on"):
        Double(FOUR_BY_TWO, config=config)
    with pytest.raises(gz.ConfigError, match=r"config=dict\): give a GraphConfig"):
        Double(TWO, config={})
    with pytest.raises(gz.ConfigError, match="is not from_deepspeed's; make it by"):
        Double(TWO).config.deepspeed  # noqa: B018
