"""`parallel2d plan` and the search behind it."""

import json
import subprocess
import sys
from dataclasses import asdict, fields, replace
from itertools import pairwise

import pytest
import yaml
from parallel2d.models.hf import to_hf
from parallel2d.models.llama_config import PRESETS, LlamaConfig

from parallel2d import UserError
from parallel2d.cli.plan_model import KEYS
from parallel2d.config import DataConfig, FsdpConfig, PrecisionConfig, RunConfig
from parallel2d.mesh_shape import MeshShape
from parallel2d.planner.calibrate import Measured, fit, predicted
from parallel2d.planner.hardware import Cluster, find_gpu, load_gpus
from parallel2d.planner.memory import MARGIN
from parallel2d.planner.model import ModelShape
from parallel2d.planner.predict import predict
from parallel2d.planner.search import Request, plan, smallest_world
from parallel2d.planner.setup import Setup
from tests.ranks import ROOT, run_recipe

GPUS = load_gpus()
SMALL = ("--model", "llama3-8b", "--gpus", "8", "--gpu", "h100")


def request(model: str = "llama3-8b", gpus: int = 8, **changes) -> Request:
    config = PRESETS[model]
    shape, cluster = ModelShape.of(config), Cluster.of(GPUS["h100"])
    made = Request(shape, model, config.problems, gpus, cluster, 8192, 2 * gpus, Setup(1, 1))
    return replace(made, **changes)


@pytest.mark.parametrize("model, gpus", [("llama3-70b", 256), ("llama3-405b", 10_000)])
def test_a_plan_takes_less_than_two_seconds_of_cpu_and_no_torch(model, gpus):
    script = (
        f"import sys, time; sys.argv = 'x plan --model {model} --gpus {gpus} --gpu h100 --json'.split()\n"
        "from parallel2d.cli.main import _main\n"
        "try: _main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, time.process_time())"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    found, said = run.stdout.splitlines()
    has_torch, cpu_s = said.split()
    assert (has_torch, float(cpu_s) < 2) == ("False", True)
    assert json.loads(found)["meshes"]


def test_best_first_what_fits_before_what_is_borderline_and_each_mesh_once():
    found = plan(request(gpus=16))
    rates = {v: [p.speed.tokens_per_s_per_gpu for p in found.predictions if p.verdict == v] for v in VERDICTS}
    # But for what is as fast within a hundredth.
    assert all(a > 0.99 * b for r in rates.values() for a, b in pairwise(r))
    verdicts = [p.verdict for p in found.predictions]
    assert verdicts == sorted(verdicts, reverse=True)  # fit, then borderline
    meshes = [str(p.mesh) for p in found.predictions]
    assert len(set(meshes) | set(found.left_out)) == len(meshes) + len(found.left_out)
    for p in found.predictions:
        assert p.mesh.world == 16 and p.setup.micro_batch * p.setup.accumulation * p.mesh.dp == 32
        assert p.memory.reserved * (1 - MARGIN) <= GPUS["h100"].memory_bytes


VERDICTS = ("fit", "borderline")


def test_the_bytes_of_a_part_are_those_of_the_peak():
    found = json.loads(json.dumps(prediction_parts()))
    assert sum(found["memory"].values()) == found["allocated_bytes"]


def prediction_parts():
    from parallel2d.planner.report import prediction_as_json

    return prediction_as_json(plan(request()).predictions[0])


def test_more_of_each_saving_needs_less_memory():
    def needs(*sizes: int, **changes) -> int:
        shape, mesh = ModelShape.of(PRESETS["llama3-8b"]), MeshShape(*(sizes or (1, 4, 2)))
        return predict(shape, mesh, Setup(2, 8192, **changes), None).memory.allocated

    none, selective, full = (needs(checkpoint=c) for c in ("none", "selective", "full"))
    assert none > selective > full
    assert needs(reshard="never") > none == needs(reshard="auto") == needs(reshard="but_last")
    assert needs(2, 2, 2) > none > needs(1, 8, 2)


def test_what_does_not_fit_says_how_many_gpus_would_do():
    with pytest.raises(UserError, match=r"fits on no mesh of 8 h100 \(79.1 GiB each\): \d+ of them"):
        plan(request("llama3-405b"))
    enough = smallest_world(request("llama3-405b"))
    assert plan(request("llama3-405b", enough, global_batch=enough)).predictions[0].verdict == "fit"
    fewer = request("llama3-405b", enough - 8, global_batch=enough - 8)
    assert {p.verdict for p in plan(fewer).predictions} == {"borderline"}


@pytest.mark.parametrize(
    "arguments, error",
    [
        (("--gpu", "h10"), "gpu 'h10' is not known: nearest names: .*h100"),
        (("--model", "lama3-8b"), "model 'lama3-8b' is not known: nearest names: llama3-8b"),
        (("--model", "none.yaml"), "none.yaml cannot be read"),
        (("--gpus", "0"), "gpus 0 is not a number from 1 to 1,048,576"),
        (
            ("--gpus", "12", "--global_batch", "7"),
            r"divisible by no dp that 12 GPUs allow \(12, 6, 3\): .* 9",
        ),
        (("--explain", "4x4"), "mesh 4x4 has 16 ranks, not 8"),
        (("--explain", "8"), "is not DPxTP"),
        (("--network-gbps", "0"), "--network-gbps 0.0 is not a positive number"),
        (("--gpus-per-node", "0"), "--gpus-per-node 0 is not a positive number"),
        (("--seq_len", "9", "--explain", "4x2"), "seq_len 9 is not divisible by tp 2"),
        (("--seq_len", "0"), "seq_len 0 is not a number from 1 to 1,099,511,627,776"),
        (("--global_batch", "0"), "global_batch 0 is not a number from 1 to 1,099,511,627,776"),
        (("--explain", "8x1x1"), "replicas of whole weights, not FSDP"),
        (("--explain", ""), "mesh '' is not DPxTP"),
        (("--top", "0"), "--top 0 is not a positive number"),
        (("--tp", "2"), "unknown: --tp 2"),
        (("--hardware", "none.yaml"), "--hardware 'none.yaml' is not a file"),
        (("--gpus", str(10**20)), "gpus 1(0){20} is not a number from 1 to 1,048,576"),
        (("--explain", "²x4"), "mesh ²x4 is not DPxTP|mesh '²x4' is not DPxTP"),
        (("--plot", str(ROOT / "README.md")), r"--plot .*README.md exists: use another name"),
        (("--calibrate", "none.jsonl", "--emit", "x"), "use it without --model, --emit"),
    ],
)
def test_bad_input_is_told(ask_plan, arguments, error):
    with pytest.raises(UserError, match=error):
        ask_plan(*SMALL, *arguments)


def test_a_recipe_and_a_config_json_describe_the_same_model(ask_plan, tmp_path):
    config = LlamaConfig(1003, 96, 2, 6, 2, 0, 160, rope_theta=500.0, tie_embeddings=True)
    recipe, hf = tmp_path / "own.yaml", tmp_path / "config.json"
    recipe.write_text(yaml.safe_dump({"model": asdict(config), "data": {"seq_len": 64, "global_batch": 24}}))
    hf.write_text(json.dumps(to_hf(config)))
    ours = json.loads(ask_plan("--model", recipe, *SMALL[2:], "--json"))
    batch = ("--seq_len", "64", "--global_batch", "24")
    theirs = json.loads(ask_plan("--model", hf, *SMALL[2:], *batch, "--json"))
    assert (ours["seq_len"], ours["global_batch"], ours["meshes"]) == (64, 24, theirs["meshes"])
    recipe.write_text("model: {widht: 3, num_layers: two}")
    recipe.write_text("data: {seqlen: 3}\nfsdp: {reshard: auto}\nstep: 3")
    with pytest.raises(UserError, match=r"data.seqlen is not known: nearest known keys: seq_len") as told:
        ask_plan("--model", recipe, *SMALL[2:])
    assert "fsdp.reshard is not known" in str(told.value) and "step is not known" in str(told.value)
    recipe.write_text("model: {widht: 3, num_layers: two}")
    with pytest.raises(UserError, match=r"model.widht is not known: nearest known keys: width") as told:
        ask_plan("--model", recipe, *SMALL[2:])
    assert "model.num_layers 'two' is not of type int" in str(told.value)


def test_the_known_keys_are_those_of_a_run():
    def names(section: type) -> list[str]:
        return [f.name for f in fields(section)]

    sections = {"data": DataConfig, "precision": PrecisionConfig, "fsdp": FsdpConfig}
    assert {section: names(kind) for section, kind in sections.items()} | {
        "": [*names(RunConfig), "model"]
    } == KEYS


def test_a_recipes_micro_batch_holds(ask_plan, tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text("data: {global_batch: 24, micro_batch: 3}")
    meshes = json.loads(ask_plan("--model", recipe, *SMALL[2:], "--json"))["meshes"]
    assert {m["micro_batch"] for m in meshes} == {3}
    assert all(24 // (m["dp_replicate"] * m["dp_shard"]) % 3 == 0 for m in meshes)
    recipe.write_text("data: {global_batch: 8, micro_batch: 3}")
    with pytest.raises(UserError, match="micro_batch 3 does not divide the 1 sequences of a rank"):
        ask_plan("--model", recipe, *SMALL[2:])


def test_of_meshes_as_fast_the_one_that_needs_least_comes_first():
    found = plan(request(global_batch=64)).predictions
    for faster, slower in pairwise(p for p in found if p.verdict == "fit"):
        ratio = faster.speed.tokens_per_s_per_gpu / slower.speed.tokens_per_s_per_gpu
        assert ratio > 1.005 or (ratio > 0.99 and faster.memory.reserved <= slower.memory.reserved)


def test_the_recipe_accepts_what_is_emitted(ask_plan, tmp_path):
    source, file = tmp_path / "own.yaml", tmp_path / "planned.yaml"
    model = {"preset": "debug", "vocab_size": 1003, "num_layers": 3}
    source.write_text(yaml.safe_dump({"optim": {"lr": 1e-3}, "model": model, "data": {"global_batch": 32}}))
    ask_plan("--model", source, *SMALL[2:], "--explain", "2x2x2", "--emit", file, "--seq_len", "256")
    (run,) = run_recipe(1, "--config", str(file), "--print_config")
    assert run.exitcode == 0, run.stderr
    read = yaml.safe_load(run.stdout)
    assert (read["dp"], read["tp"], read["dp_replicate"], read["optim"]["lr"]) == (4, 2, 2, 1e-3)
    emitted = yaml.safe_load(file.read_text())
    assert read["data"] == read["data"] | emitted["data"] and read["data"]["seq_len"] == 256
    assert read["activation_checkpoint"] == emitted["activation_checkpoint"]
    with pytest.raises(UserError, match=r"planned.yaml exists: use another name"):
        ask_plan("--model", source, *SMALL[2:], "--emit", file)
    assert yaml.safe_load(file.read_text()) == emitted
    assert read["model"] == asdict(replace(PRESETS["debug"], vocab_size=1003, num_layers=3)) | (
        {"preset": "debug"} if "preset" in read["model"] else {}
    )


def test_a_size_of_resharding_leaves_the_meshes_that_can_have_it():
    found = plan(request(reshards=(2,)))
    assert [str(p.mesh) for p in found.predictions] == ["8×1", "8×1 (dp_replicate 2)"]
    assert found.left_out["4×2"] == "reshard_after_forward 2 needs tp 1 and a multiple of 2 as dp_shard"
    with pytest.raises(UserError, match="runs on no mesh of 8 GPUs"):
        plan(request(reshards=(3,)))


def test_tp_stays_within_a_node():
    def left_out(gpus: int, per_node: int) -> str:
        cluster = Cluster.of(GPUS["h100"], per_node)
        return "\n".join(f"{k}: {v}" for k, v in plan(request(gpus=gpus, cluster=cluster)).left_out.items())

    # Pairs on nodes of three: every second pair lies on two of them.
    assert "tp 2, 4, 6, 12: would span nodes of 3 GPUs" in left_out(12, 3)
    assert "would span nodes" not in left_out(8, 8)
    assert "tp 7: num_heads 32 is not divisible by" in left_out(7, 8)


def test_explained_is_all_of_one_mesh(ask_plan):
    said = ask_plan(*SMALL, "--explain", "4x2")
    for piece in ("<- the peak", "c·(", "dp_shard", "reduce_scatter", "FLOPs", "seconds", "limited by"):
        assert piece in said
    assert "mesh" in ask_plan(*SMALL, "--top", "1") and "left out" in ask_plan(*SMALL, "--gpus-per-node", "4")


def test_without_matplotlib_a_plot_says_what_to_install(ask_plan, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "parallel2d.cli.plan_plot", raising=False)
    with pytest.raises(UserError, match=r"pip install 'parallel2d\[plot\]'"):
        ask_plan(*SMALL, "--plot", tmp_path / "plan.png")


def test_a_plot_is_drawn(ask_plan, tmp_path):
    pytest.importorskip("matplotlib", reason="an extra: pip install 'parallel2d[plot]'")
    ask_plan(*SMALL, "--plot", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    "name, entry",
    [
        ("H100-SXM-80GB", "h100"),
        ("H100-96GB-HBM2e-500W", "h100-96gb"),
        ("NVIDIA H200", "h200"),
        ("GB200-192GB", "gb200"),
        ("B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("MI300X", "mi300x"),
        ("TPU v5", None),
    ],
)
def test_gpus_are_found_by_the_pieces_of_their_names(name, entry):
    found = find_gpu(name, GPUS)
    assert (found and found.name) == entry


def test_a_gpu_of_ones_own(ask_plan, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("big: {like: h100, memory_gib: 1000, reached: {arithmetic: 0.9}}")
    bigger = load_gpus(own)["big"]
    assert (bigger.memory_gib, bigger.reached.arithmetic) == (1000, 0.9)
    assert bigger.reached.network == GPUS["h100"].reached.network
    assert GPUS["h100"].fitted_on and not bigger.fitted_on
    assert json.loads(ask_plan(*SMALL, "--gpu", "big", "--hardware", own, "--json"))["gpu"] == "big"
    own.write_text("bad: {memory_gib: -1, speed: 3}")
    with pytest.raises(UserError, match="speed is not known") as told:
        load_gpus(own)
    assert "memory_gib -1 is not a number above 0" in str(told.value) and "flops is missing" in str(
        told.value
    )
    for text, error in (("[", "not YAML"), ("- 1", "not a mapping"), ("a: {like: b}", "no other entry")):
        own.write_text(text)
        with pytest.raises(UserError, match=error):
            load_gpus(own)


def measured(constants: Cluster, **changes) -> Measured:
    run = Measured(ModelShape.of(PRESETS["llama3-8b"]), MeshShape(1, 8, 1), Setup(2, 8192, **changes), 1.0)
    return replace(run, tokens_per_s=predicted(run, constants))


@pytest.mark.parametrize(
    "entry, error",
    [
        ("{like: h100, flops: 989e12}", r"flops '989e12' is not a number above 0 \(.*write 989.0e\+12\)"),
        ("{like: h100, reached: {arithmetic: 60}}", "reached.arithmetic 60 is a fraction"),
        ("{like: h100, reached: 0.5}", "reached must be a mapping of arithmetic"),
        ("{like: h100, names: H1000}", "names 'H1000' is not a list of names"),
        ("{like: h100, bandwidth: .inf}", "bandwidth inf is not a number"),
        ("{like: [h100]}", "is no other entry"),
        ("{like: own}", r"like 'own' is no other entry \(these are: (?!.*own)"),
    ],
)
def test_mistakes_in_an_entry_are_told(tmp_path, entry, error):
    (tmp_path / "own.yaml").write_text(f"own: {entry}")
    with pytest.raises(UserError, match=error):
        load_gpus(tmp_path / "own.yaml")


def test_pieces_of_a_name_are_text(tmp_path):
    (tmp_path / "own.yaml").write_text("own: {like: H100, names: ['X.* (1']}")
    gpus = load_gpus(tmp_path / "own.yaml")
    assert find_gpu("X.* (1", gpus) == gpus["own"] and find_gpu("XYZ 1", gpus) is None


def test_a_recipe_that_asks_for_gathers_in_backward_gets_them(ask_plan, tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text("fsdp: {backward_prefetch: 2}")
    found = json.loads(ask_plan("--model", recipe, *SMALL[2:], "--explain", "8x1", "--json"))
    assert found["reshard_after_forward"] == "but_last"
    recipe.write_text("fsdp: {backward_prefetch: 2, reshard_after_forward: never}")
    with pytest.raises(UserError, match="backward gathers nothing"):
        ask_plan("--model", recipe, *SMALL[2:])


def test_a_recipes_float8_and_async_tp_change_the_speed(ask_plan, tmp_path):
    recipe = tmp_path / "own.yaml"

    def rate(text: str, *more: str) -> float:
        recipe.write_text(text)
        asked = ("--seq_len", "4096", "--explain", "1x8", "--json", *more)
        return json.loads(ask_plan("--model", recipe, *SMALL[2:], *asked))["tokens_per_s_per_gpu"]

    model = "model: {preset: llama3-8b}\nactivation_checkpoint: none\ncompile: true\n"
    plain = rate(model)
    assert rate(model + "async_tp: true") > 1.02 * plain
    assert rate(model + "precision: {float8: rowwise}") > 1.02 * plain
    for text, error in (
        ("async_tp: some", "async_tp 'some' is neither true nor false"),
        ("precision: {float8: fp8}", "precision.float8 'fp8' is not one of none, tensorwise, rowwise"),
    ):
        with pytest.raises(UserError, match=error):
            rate(model + text)
    with pytest.raises(UserError, match=r"precision.float8 rowwise: a100.* has no float8"):
        rate(model + "precision: {float8: rowwise}", "--gpu", "a100")
    with pytest.raises(UserError, match="float8 blocks cannot be traced"):
        recipe.write_text("precision: {float8: rowwise}")
        ask_plan("--model", recipe, *SMALL[2:], "--trace", "--mesh", "1x8")


@pytest.mark.parametrize(
    "changes, line, error",
    [
        ({"tp": 0}, {"tokens_per_s": 1.0}, "tp 0 is not a positive number"),
        ({"data": {"seq_len": "x", "global_batch": 16}}, {"tokens_per_s": 1.0}, "data.seq_len 'x'"),
        (
            {"activation_checkpoint": "some"},
            {"tokens_per_s": 1.0},
            "activation_checkpoint 'some' is not one of",
        ),
        ({}, {"tokens_per_s": -5.0}, "tokens_per_s -5.0 is no rate"),
        ({}, {"tokens_per_s": None}, "tokens_per_s None is no rate"),
    ],
    ids=str,
)
def test_a_run_that_cannot_be_calibrated_from(ask_plan, tmp_path, changes, line, error):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(changes))
    (tmp_path / "metrics.jsonl").write_text("3\n" + 3 * (json.dumps(line) + "\n"))
    with pytest.raises(UserError, match=error):
        ask_plan("--gpus", "8", "--gpu", "h100", "--calibrate", tmp_path / "metrics.jsonl")


def test_calibration_meets_the_runs_it_is_given():
    truth = Cluster.of(
        replace(GPUS["h100"], reached=replace(GPUS["h100"].reached, arithmetic=0.4, attention=0.3))
    )
    runs = [measured(truth, checkpoint=c) for c in ("none", "full")]
    found = fit(runs, Cluster.of(GPUS["h100"]))
    for run in runs:
        assert predicted(run, found) == pytest.approx(run.tokens_per_s, rel=0.03)
        assert predicted(run, Cluster.of(GPUS["h100"])) > 1.2 * run.tokens_per_s


def test_calibration_reads_a_run_folder(ask_plan, tmp_path):
    config = {"tp": 2, "model": {"preset": "llama3-8b"}, "data": {"seq_len": 8192, "global_batch": 16}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [{"step": n, "loss": 1.0, "tokens_per_s": rate} for n, rate in enumerate((9, 40_000, 41_000), 1)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = ask_plan("--gpus", "8", "--gpu", "h100", "--calibrate", file)
    own = tmp_path / "own.yaml"
    own.write_text(said)
    gpus = load_gpus(own)
    assert gpus["my-h100"].fitted_on == str(file) and gpus["my-h100"].flops == GPUS["h100"].flops
    assert " 5062 " in said  # the median of the second and third, of 8 GPUs
    run = json.loads(ask_plan(*SMALL, "--gpu", "my-h100", "--hardware", own, "--json", "--explain", "4x2"))
    assert run["tokens_per_s_interval"] == 0.25
    with pytest.raises(UserError, match=r"its run had 8 processes, not --gpus 4"):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"dp": 4}))
        ask_plan("--gpus", "4", "--gpu", "h100", "--calibrate", file)
    with pytest.raises(
        UserError, match=r"metrics.jsonl: measured \d+ tokens/s per GPU, fitted \d+, which is no fit"
    ):
        small = config | {"model": {"preset": "debug"}, "data": {"seq_len": 128, "global_batch": 16}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(small))
        ask_plan("--gpus", "8", "--gpu", "h100", "--calibrate", file)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    file.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(UserError, match="no two logged steps"):
        ask_plan("--gpus", "8", "--gpu", "h100", "--calibrate", file)
