"""Configuration: what wins over what, and mistakes that are named."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from parallel2d.models.llama import PRESETS, LlamaConfig
from parallel2d.models.rope import RopeScaling

from parallel2d import UserError
from parallel2d.config import RunConfig
from parallel2d.flags import dump_config, load_config


@dataclass(frozen=True)
class Recipe(RunConfig):
    """A recipe.

    Args:
        model: shape.
    """

    model: LlamaConfig = field(default_factory=LlamaConfig)


@pytest.fixture
def load(tmp_path):
    (tmp_path / "recipe.yaml").write_text("steps: 7\nmodel:\n  preset: debug\n")

    def call(*arguments: str) -> Recipe:
        return load_config(Recipe, tmp_path / "recipe.yaml", PRESETS, arguments)

    return call


def write(folder: Path, text: str) -> str:
    (folder / "extra.yaml").write_text(text)
    return str(folder / "extra.yaml")


def test_what_wins(load, tmp_path):
    assert load().steps == 7
    assert load().model == PRESETS["debug"]
    assert load("--model.preset", "llama3-8b").model == PRESETS["llama3-8b"]
    config = write(tmp_path, "steps: 8\nmodel: {preset: llama3-8b, num_layers: 3}\noptim: {lr: 1e-4}\n")
    loaded = load("--config", config, "--model.width", "64")
    assert (loaded.steps, loaded.optim.lr) == (8, 1e-4)
    assert (loaded.model.width, loaded.model.num_layers, loaded.model.vocab_size) == (64, 3, 128_256)
    assert load("--config", config, "--steps", "9").steps == 9


def test_the_resolved_configuration_reads_back(load, tmp_path):
    config = load("--model.preset", "llama3-8b", "--optim.lr", "1e-5", "--data.path", "x", "--tp", "2")
    assert load("--config", write(tmp_path, dump_config(config))) == config


def test_a_word_or_a_number(load, tmp_path):
    assert load().fsdp.reshard_after_forward == "auto"
    assert load("--fsdp.reshard_after_forward", "2").fsdp.reshard_after_forward == 2
    config = load("--config", write(tmp_path, "fsdp: {reshard_after_forward: 4}\nfreeze: ['*', '!norm*']\n"))
    assert (config.fsdp.reshard_after_forward, config.freeze) == (4, ["*", "!norm*"])
    assert load("--config", write(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp: {reshard_after_forward: sometimes}\n", "fsdp.reshard_after_forward"),
        ("fsdp: {reshard_after_forward: true}\n", "fsdp.reshard_after_forward"),
        ("fsdp: {gradient_sync: first}\n", "fsdp.gradient_sync"),
        ("freeze: norm\n", "freeze"),
        ("optim:\n  learning_rte: 1\n", "nearest known keys: optim.lr, optim.schedule"),
        ("stepz: 1\n", "nearest known keys: steps"),
        ("optim:\n  lr: 1\n  lr: 2\n", "line 3: key 'lr' is given twice"),
        ("optim:\n\tlr: 1\n", "is not YAML"),
        ("optim: {lr: fast}\n", "optim.lr"),
        ("optim: {lr: null}\n", "lr has no value"),
        ("optim:\n", "optim"),
        ("data: 3\n", "data"),
        ("model:\n", "model"),
        ("steps:\n", "steps"),
        ("? [a, b]\n: 1\n", "line 1: a key must be a word"),
        ("model: {preset: huge}\n", "model.preset 'huge' is not one of debug"),
    ],
)
def test_mistakes_in_a_file(load, tmp_path, text, message):
    with pytest.raises(UserError) as caught:
        load("--config", write(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parallel.tpp=2",), "nearest known keys: tp"),
        (("--optim.warmup", "3"), "optim.warmup_steps"),
        (("--dp-replicate", "3"), "nearest known keys: dp_replicate"),
        (("--dp", "2.5"), "dp"),
        (("--optim.schedule", "sine"), "sine"),
        (("--config", "nothing.yaml"), "'nothing.yaml' is not a file"),
    ],
)
def test_mistakes_in_flags(load, arguments, message):
    with pytest.raises(UserError) as caught:
        load(*arguments)
    assert message in str(caught.value)


def test_rules_that_values_break_by_themselves(load):
    broken = ["--steps", "0", "--seed", "-1", "--timeout_s", "0", "--optim.lr", "-1", "--optim.beta2", "1"]
    broken += ["--optim.max_norm", "0", "--checkpoint.keep", "-1", "--log.every", "0"]
    found = "\n".join(load(*broken).problems(dp=1, tp=1))
    for name in (
        "steps 0",
        "seed -1 is not in",
        "timeout_s 0",
        "lr -1",
        "beta2 1",
        "max_norm 0",
        "keep -1",
        "every 0",
    ):
        assert name in found
    assert load("--data.val_fraction", "1").problems(1, 1) == ["data.val_fraction 1.0 is not between 0 and 1"]


def test_batch_and_sequence_must_fit_the_mesh(load):
    assert load().problems(dp=4, tp=2) == []
    assert load("--data.seq_len", "30").problems(1, 4) == [
        "data.seq_len 30 is not divisible by tp 4: use 28 or 32"
    ]
    assert load().problems(3, 1) == ["data.global_batch 16 is not divisible by dp 3: use 18"]
    assert "16 is not data.micro_batch 3 × dp 2" in load("--data.micro_batch", "3").problems(2, 1)[0]


def test_dtypes_follow_the_device(load):
    names = lambda device, *flags: [str(d)[6:] for d in load(*flags).precision.dtypes(device)]  # noqa: E731
    assert names("cpu") == ["float32"] * 3
    assert names("cuda") == ["float32", "bfloat16", "float32"]
    assert names("cuda", "--precision.param", "float64") == ["float64"] * 3
    assert names("cuda", "--precision.compute", "float32") == ["float32"] * 3
    assert names("cpu", "--precision.param", "bfloat16") == ["bfloat16", "bfloat16", "float32"]


@pytest.mark.parametrize(
    ("fields", "tp", "message"),
    [
        (
            {"num_heads": 9, "width": 90, "num_kv_heads": 9},
            2,
            "num_heads 9 is not divisible by tp 2: use tp 1, 3, 9",
        ),
        (
            {"num_heads": 12, "head_dim": 4, "num_kv_heads": 6},
            4,
            "num_kv_heads 6 neither divides tp 4 nor is divisible by it: use tp 1, 2, 3, 6, 12",
        ),
        ({"rope_scaling": RopeScaling(factor=4.0)}, 1, "rope_scaling has values but kind none: use kind"),
        ({"rope_scaling": RopeScaling("linear", 0.0)}, 1, "model.rope_scaling.factor 0.0 is not positive"),
        ({"num_kv_heads": 3}, 1, "num_heads 8 is not divisible by num_kv_heads 3"),
        ({"width": 100}, 1, "model.width 100 is not divisible by model.num_heads 8"),
        ({"head_dim": 5}, 1, "head size 5 is odd"),
        ({"vocab_size": 9}, 8, "vocab_size 9 leaves ranks of tp 8 without a row"),
        ({"num_layers": 0}, 1, "model.num_layers 0 is not positive"),
    ],
)
def test_a_model_that_does_not_fit(fields, tp, message):
    assert message in "\n".join(LlamaConfig(**fields).problems(tp))


def test_async_is_a_word_of_python_and_still_a_key(load, tmp_path, capsys):
    """As a flag, in YAML, in --print_config and in what a run writes down."""
    assert load().checkpoint.async_ is True
    assert load("--checkpoint.async", "false").checkpoint.async_ is False
    config = write(tmp_path, "checkpoint: {async: false, keep_every: 5, keep_best: 2}\n")
    given = load("--config", config)
    assert (given.checkpoint.async_, given.checkpoint.keep_every, given.checkpoint.keep_best) == (False, 5, 2)
    assert load("--config", config, "--checkpoint.async", "true").checkpoint.async_ is True
    dumped = dump_config(given)
    assert "  async: false\n" in dumped and "async_" not in dumped.replace("async_tp", "")
    assert load("--config", write(tmp_path, dumped)) == given
    with pytest.raises(SystemExit):
        load("--checkpoint.async", "false", "--print_config")
    printed = capsys.readouterr().out
    assert "  async: false\n" in printed and "async_" not in printed.replace("async_tp", "")
    assert load("--config", write(tmp_path, printed)).checkpoint.async_ is False
