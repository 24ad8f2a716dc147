"""Train a Llama on a dp × tp mesh: torchrun recipes/llama_2d.py --dp 4 --tp 2

Reads from top to bottom as the run runs; each call leads to one file of parallel2d/.
"""

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from parallel2d.models.llama import PRESETS, Llama, LlamaConfig
from torch.distributed.device_mesh import DeviceMesh

from parallel2d import forecast, launch
from parallel2d.checkpoint.find import remove_leftovers
from parallel2d.checkpoint.load import Resume, Resumed, load_newest, resume_from
from parallel2d.checkpoint.retention import VAL_LOSS, Retention
from parallel2d.checkpoint.store import CheckpointStore
from parallel2d.compile import async_tp_problems, compile_problems
from parallel2d.config import RunConfig
from parallel2d.data import Corpus, RankData, load_tokens
from parallel2d.errors import UserError
from parallel2d.flags import dump_config, load_config
from parallel2d.float8 import float8_problems
from parallel2d.freeze import freeze
from parallel2d.fsdp import Precision
from parallel2d.generate import generate
from parallel2d.init import init_weights
from parallel2d.ledger import Observer, expected_step, table
from parallel2d.loss import VocabShard
from parallel2d.mesh import MeshShape, build_mesh, choose_mesh, dp_rank, dp_size, mesh_shapes
from parallel2d.metrics import Monitor, Run
from parallel2d.optim import LearningRate, build_optimizer, set_learning_rate
from parallel2d.parallelize import parallelize
from parallel2d.planner.model import ModelShape
from parallel2d.run_folder import lock, next_commands, require_usable, write_config
from parallel2d.step import evaluate, seed_step, train_step
from parallel2d.summary import summary


@dataclass(frozen=True)
class Recipe(RunConfig):
    """A Llama and how it is trained.

    Args:
        model: shape of the Llama.
    """

    model: LlamaConfig = field(default_factory=LlamaConfig)


def main() -> None:
    # What can be known to be wrong is found here, before a process is started or a file written.
    config = load_config(Recipe, Path(__file__).with_suffix(".yaml"), PRESETS)
    config = forecast.with_planned_mesh(config, ModelShape.of(config.model), problems)
    world = launch.planned_world(*config.sizes, config.device)
    shape = choose_mesh(*config.sizes, world, lambda s: problems(config, s))
    model = build_model(config)
    data, vocab_size = config.data, config.model.vocab_size
    corpus = Corpus(load_tokens(data.path), data.seq_len, vocab_size, data.val_fraction, config.seed)
    choice, partial = config.checkpoint.resume, config.checkpoint.partial
    resume = resume_from(choice, Path(config.out), asdict(config.model), partial=partial)
    if resume and resume.step >= config.steps:
        launch.say(f"{config.out} is at step {resume.step}: to go on, raise --steps (now {config.steps})")
        return
    require_usable(Path(config.out))
    with launch.world(shape.world, config.device, config.timeout_s) as device:
        train(config, shape, device, model, corpus, resume)


def problems(config: Recipe, shape: MeshShape) -> list[str]:
    found = config.problems(shape.dp, shape.tp) + config.model.problems(shape.tp)
    device_type = launch.device_type(config.device)
    found += config.fsdp.problems(Llama, shape.dp_shard, shape.tp, device_type)
    if config.data.path and Path(config.out).resolve().is_relative_to(Path(config.data.path).resolve()):
        found.append(
            f"out {config.out} lies in data.path {config.data.path}: a run would read what it writes"
        )
    if config.compile:
        found += compile_problems()
    if config.async_tp:
        found += async_tp_problems(config.compile, shape.tp, device_type)
    found += float8_problems(config.precision.float8, device_type)
    if config.data.path is None and config.model.vocab_size < 256:
        found.append(f"model.vocab_size {config.model.vocab_size} is below 256, the number of byte values")
    return found


def build_model(config: Recipe) -> Llama:
    """The whole model without its values, which takes no memory."""
    with torch.device("meta"):
        model = Llama(config.model)
    freeze(model, config.freeze)
    return model


def train(
    config: Recipe,
    shape: MeshShape,
    device: torch.device,
    model: Llama,
    corpus: Corpus,
    resume: Resume | None,
) -> None:
    held = lock(Path(config.out)) if dist.get_rank() == 0 else None
    launch.require_agreement(data=corpus.fingerprint(), checkpoints=resume.steps if resume else None)
    mesh = build_mesh(shape, device.type)
    predicted = forecast.forecast(config, ModelShape.of(config.model), shape, *forecast.here(config))
    # Before anything large is allocated.
    launch.say(forecast.before(config, predicted))
    materialise(config, model, mesh, device)
    optim = config.optim
    optimizer = build_optimizer(model, optim.lr, (optim.beta1, optim.beta2), optim.weight_decay)
    resumed = resume and load_newest(resume, model, optimizer, checkpoints(config))
    start = Progress.of(resumed, corpus)
    micro_batch = config.data.micro_batch_of(shape.dp)
    monitor = open_monitor(config, model, shape, device, start)
    if dist.get_rank() == 0:
        dtypes = config.precision.dtypes(device.type)
        monitor.say(summary(model, shape, device, dtypes, corpus, config.data.global_batch, micro_batch))
        monitor.say(described_start(resumed, corpus))
    data = RankData(corpus, config.data.global_batch, micro_batch, dp_rank(mesh), shape.dp, device)
    launch.settle()
    with open_store(config, monitor, resumed) as store:
        val_loss = fit(config, mesh, model, optimizer, data, store, monitor, start)

    if dist.get_rank() == 0:
        alone = f"token frequencies alone: {corpus.unigram_loss():.4f}"
        monitor.say(f"result    validation loss {val_loss:.4f} nats per token ({alone})")
        monitor.say(forecast.after(config, predicted, device))
    show_sample(config, mesh, model, corpus, device, monitor)
    others = [s for s in mesh_shapes(shape.world) if s != shape and not problems(config, s)]
    nearest = sorted(others, key=lambda s: abs(s.tp - shape.tp))[:1]
    monitor.say(next_commands(config.out, 2 * config.steps, [(s.dp, s.tp) for s in nearest]))
    monitor.close()
    if held:
        held.close()


@dataclass(frozen=True)
class Progress:
    """How far a run is: updates done, sequences consumed (the data position), tokens seen."""

    step: int = 0
    position: int = 0
    tokens_seen: int = 0

    @classmethod
    def of(cls, resumed: Resumed | None, corpus: Corpus) -> "Progress":
        if resumed is None or resumed.weights_only:
            return cls()
        state = resumed.checkpoint.manifest.trainer
        # In other data, or in another order of it, the old position would mean nothing.
        position = state.get("position", 0) if state.get("data") == corpus.fingerprint() else 0
        return cls(resumed.checkpoint.step, position, state.get("tokens_seen", 0))


def described_start(resumed: Resumed | None, corpus: Corpus) -> str:
    if resumed is None:
        return "start     from nothing"
    lines = [*(f"note      {note}" for note in resumed.notes), f"start     {resumed}"]
    if not resumed.weights_only and resumed.checkpoint.manifest.trainer.get("data") != corpus.fingerprint():
        lines.append(
            "note      the data or its order differs from the checkpoint's: reading it from its start"
        )
    return "\n".join(lines)


def checkpoints(config: Recipe) -> Path:
    return Path(config.out) / "checkpoints"


def open_store(config: Recipe, monitor: Monitor, resumed: Resumed | None) -> CheckpointStore:
    rules = config.checkpoint
    retention = Retention(rules.keep, rules.keep_every, rules.keep_best)
    return CheckpointStore(
        checkpoints(config), retention, background=rules.async_, tell=monitor.say, resumed=resumed
    )


def materialise(config: Recipe, model: Llama, mesh: DeviceMesh, device: torch.device) -> None:
    precision = config.precision
    parallelize(
        model,
        mesh,
        plan=model.tp_plan(),
        units=list(model.blocks),
        precision=Precision(
            *precision.dtypes(device.type), precision.output_dtype(), precision.cast_inputs, precision.float8
        ),
        fsdp=config.fsdp.policy(),
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        async_tp=config.async_tp,
    )
    init_weights(model, device, config.seed, offload=config.fsdp.offload)


def fit(
    config: Recipe,
    mesh: DeviceMesh,
    model: Llama,
    optimizer: torch.optim.Optimizer,
    data: RankData,
    store: CheckpointStore,
    monitor: Monitor,
    start: Progress,
) -> float:
    """One round of the loop is one optimizer update. Returns the last validation loss."""
    optim, vocab = config.optim, VocabShard.of(config.model.vocab_size, mesh["tp"])
    learning_rate = LearningRate(optim.lr, optim.schedule, optim.warmup_steps, config.steps, optim.final)
    val_loss, done = math.nan, start
    if done.step == 0:
        val_loss = validate(config, model, data, vocab, mesh)
        monitor.validation(0, val_loss)
    while done.step < config.steps:
        monitor.begin_step()
        lr = learning_rate(done.step)
        set_learning_rate(optimizer, lr)
        seed_step(config.seed, done.step, data.rank)
        batches = data.train_step(done.position)
        observer = Observer(mesh) if config.ledger and done == start else None
        try:
            with observer or nullcontext():
                sync = config.fsdp.gradient_sync
                stats = train_step(model, batches, optimizer, vocab, mesh, optim.max_norm, sync)
        except FloatingPointError as error:
            raise UserError(f"step {done.step + 1}: {error}: lower optim.lr") from None
        if observer:
            step = forecast.step_of(config, config.model.width, dp_size(mesh), mesh.device_type)
            monitor.say(table(expected_step(model, list(model.blocks), mesh, step), observer.ledger))
        done = Progress(done.step + 1, done.position + data.global_batch, done.tokens_seen + stats.tokens)
        monitor.end_step(done.step, stats, lr, done.tokens_seen)
        if done.step == start.step + 1:
            store.reserve(model, optimizer)
        store.poll()

        last = done.step == config.steps
        validated = last or is_due(done.step, config.log.val_every)
        if validated:
            val_loss = validate(config, model, data, vocab, mesh)
            monitor.validation(done.step, val_loss)
        if last or is_due(done.step, config.checkpoint.every):
            state = {**asdict(done), "data": data.corpus.fingerprint(), "model": asdict(config.model)}
            state |= {VAL_LOSS: val_loss} if validated and math.isfinite(val_loss) else {}
            monitor.checkpoint(done.step, store.save(done.step, model, optimizer, state))
    return val_loss


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def validate(config: Recipe, model: Llama, data: RankData, vocab: VocabShard, mesh: DeviceMesh) -> float:
    return evaluate(model, data.validation(config.log.val_batches), vocab, mesh)


def open_monitor(
    config: Recipe, model: Llama, shape: MeshShape, device: torch.device, start: Progress
) -> Monitor:
    """The run folder's curves; rank 0 also clears leftovers and writes the resolved configuration."""
    out, text = Path(config.out), dump_config(config)
    if dist.get_rank() == 0:
        remove_leftovers(checkpoints(config))
        write_config(out, text)
    flops = model.flops_per_token(config.data.seq_len)
    run = Run(start.step, config.steps, flops, device, shape.world)
    return Monitor(out, run, every=config.log.every, config_text=text, rank=dist.get_rank())


def show_sample(
    config: Recipe, mesh: DeviceMesh, model: Llama, corpus: Corpus, device: torch.device, monitor: Monitor
) -> None:
    """A text by the sharded model; every rank takes part."""
    if not config.log.sample_tokens:
        return
    prompt = corpus.prompt("    def __init__(self, ")
    vocab = VocabShard.of(config.model.vocab_size, mesh["tp"])
    ids = generate(
        model,
        torch.tensor([prompt], device=device),
        config.log.sample_tokens,
        vocab=vocab,
        context=config.data.seq_len,
        temperature=0.7,
        seed=config.seed,
    )
    monitor.say(f"sample    {len(prompt)} tokens given, {config.log.sample_tokens} generated:")
    monitor.say(corpus.decode(ids[0].tolist()))


if __name__ == "__main__":
    launch.run(main)
