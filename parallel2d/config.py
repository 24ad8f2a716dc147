"""The schema of a YAML recipe: frozen dataclasses that know their own rules."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from parallel2d.errors import UserError
from parallel2d.fsdp import FsdpPolicy

DtypeName = Literal["float32", "float64", "bfloat16"]


@dataclass(frozen=True)
class DataConfig:
    """What is trained on.

    Args:
        path: a .bin (uint16) or .npy token file, or any file or folder, read as bytes; not given: the
            source text of Python's standard library.
        seq_len: tokens per sequence.
        global_batch: sequences per optimizer update, over all ranks.
        micro_batch: sequences per forward and rank; 0 means global_batch / dp, without accumulation.
        val_fraction: share of the text, at its end, held out for validation.
    """

    path: str | None = None
    seq_len: int = 128
    global_batch: int = 16
    micro_batch: int = 0
    val_fraction: float = 0.05

    def micro_batch_of(self, dp: int) -> int:
        return self.micro_batch or self.global_batch // dp

    def problems(self, dp: int, tp: int) -> list[str]:
        found = _below("data", self, 1, "seq_len", "global_batch") + _below("data", self, 0, "micro_batch")
        if not 0 < self.val_fraction < 1:
            found.append(f"data.val_fraction {self.val_fraction} is not between 0 and 1")
        if found:
            return found
        if self.seq_len % tp:
            below, above = self.seq_len // tp * tp, -(-self.seq_len // tp) * tp
            near = f"{below} or {above}" if below else f"{above}"
            found.append(f"data.seq_len {self.seq_len} is not divisible by tp {tp}: use {near}")
        if self.global_batch % dp:
            above = -(-self.global_batch // dp) * dp
            found.append(f"data.global_batch {self.global_batch} is not divisible by dp {dp}: use {above}")
        elif (self.global_batch // dp) % self.micro_batch_of(dp):
            found.append(
                f"data.global_batch {self.global_batch} is not data.micro_batch {self.micro_batch} × "
                f"dp {dp} × a whole number of accumulation steps"
            )
        return found


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule.

    Args:
        lr: peak learning rate.
        schedule: what follows the warmup; wsd is constant until the last fifth, then a line down.
        warmup_steps: updates until the peak.
        final: last learning rate as a fraction of the peak.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        weight_decay: of matrices; vectors (norms, biases) never decay.
        max_norm: gradients are scaled down to this global norm.
    """

    lr: float = 3e-3
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_steps: int = 10
    final: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    max_norm: float = 1.0

    def problems(self) -> list[str]:
        found = _below("optim", self, 0, "lr", "warmup_steps", "final", "weight_decay")
        if self.max_norm <= 0:
            found.append(f"optim.max_norm {self.max_norm} is not positive")
        found += [
            f"optim.{name} {value} is not in [0, 1)"
            for name in ("beta1", "beta2")
            if not 0 <= (value := getattr(self, name)) < 1
        ]
        return found


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats.

    Args:
        param: weights and optimizer state at rest.
        compute: forward and backward; not given: bfloat16 on CUDA over float32 weights, else as param.
        reduce: gradient reduction over dp; not given: float32, or float64 over float64 weights.
        output: what the model returns, the logits, is cast to it; not given: left as computed.
        cast_inputs: cast the model's floating-point inputs to `compute` (token ids are none).
        float8: matrix products of the blocks, with torchao: a scale for each tensor, or each row, or each
            row with weight gradients in `compute` (rowwise_with_gw_hp); on a CPU only the rounding.
    """

    param: DtypeName = "float32"
    compute: DtypeName | None = None
    reduce: DtypeName | None = None
    output: DtypeName | None = None
    cast_inputs: bool = True
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"

    def dtypes(self, device_type: str) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """param, compute and reduce, with what was not given filled in for this device."""
        mixed = device_type == "cuda" and self.param == "float32"
        compute = self.compute or ("bfloat16" if mixed else self.param)
        reduce = self.reduce or ("float64" if self.param == "float64" else "float32")
        return getattr(torch, self.param), getattr(torch, compute), getattr(torch, reduce)

    def output_dtype(self) -> torch.dtype | None:
        return getattr(torch, self.output) if self.output else None


@dataclass(frozen=True)
class FsdpConfig:
    """How FSDP trades memory for traffic; `FsdpPolicy` and `set_gradient_sync` know the rules.

    Args:
        reshard_after_forward: what is freed after forward and gathered again in backward: but_last, all
            blocks but the last; always, everything; never, nothing; a number N, as but_last, but kept in
            shards over groups of N ranks (N divides dp_shard; tp 1 only); auto, nothing of blocks that
            take at most 64 MiB of a rank together, else as but_last.
        offload: keep weights, gradients and optimizer state in pinned host memory (CUDA only).
        forward_prefetch: blocks that are gathered before the forward that precedes theirs.
        backward_prefetch: likewise in backward; 0 is FSDP's own way, one block.
        forward_methods: methods of the model besides forward that may be called on sharded weights.
        gradient_sync: when accumulated gradients are reduced over dp: with every micro-batch, with the
            last only, or over the shards with every and over the replicas with the last (replicas_last).
    """

    reshard_after_forward: Literal["auto", "but_last", "always", "never"] | int = "auto"
    offload: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    forward_methods: list[str] = field(default_factory=list)
    gradient_sync: Literal["every", "last", "replicas_last"] = "every"

    def policy(self) -> FsdpPolicy:
        """What `parallelize` is given; gradient_sync is for `train_step`."""
        return FsdpPolicy(
            self.reshard_after_forward,
            self.offload,
            self.forward_prefetch,
            self.backward_prefetch,
            tuple(self.forward_methods),
        )

    def problems(self, model: type[nn.Module], dp_shard: int, tp: int, device_type: str) -> list[str]:
        return [f"fsdp.{problem}" for problem in self.policy().problems(model, dp_shard, tp, device_type)]


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, what to keep, where to go on.

    Args:
        every: updates between checkpoints; the last update is always saved. 0: only the last.
        async_: (written `async`) copy what is to be saved, and write the copy while training goes on.
        keep: how many of the newest stay; 0 keeps all.
        keep_every: those at multiples of so many updates stay for good; 0: none.
        keep_best: how many of the lowest validation loss stay besides.
        resume: auto goes on at the newest intact checkpoint of --out, if there is one; never starts anew
            and wants an --out without any; a path is a checkpoint or another run's folder.
        partial: with a path, take the weights that fit, say what is left, and start at step 0.
    """

    every: int = 100
    async_: bool = True
    keep: int = 3
    keep_every: int = 0
    keep_best: int = 0
    resume: str = "auto"
    partial: bool = False

    def problems(self, val_every: int) -> list[str]:
        found = _below("checkpoint", self, 0, "every", "keep", "keep_every", "keep_best")
        if self.partial and self.resume in ("auto", "never"):
            found.append(
                f"checkpoint.partial is for checkpoint.resume PATH, not for {self.resume}: a run goes on "
                f"with all of its own checkpoint"
            )
        if self.keep_best and (not val_every or self.every % val_every):
            found.append(
                f"checkpoint.keep_best {self.keep_best} needs the validation loss of the saved weights: make "
                f"checkpoint.every {self.every} a multiple of log.val_every {val_every}"
            )
        return found


@dataclass(frozen=True)
class LogConfig:
    """What is shown, and how often.

    Args:
        every: updates between progress lines and points of the curves.
        val_every: updates between validations; 0: only at the end.
        val_batches: validation sequences, in multiples of data.global_batch.
        sample_tokens: length of the text generated at the end; 0: none.
    """

    every: int = 10
    val_every: int = 50
    val_batches: int = 4
    sample_tokens: int = 100

    def problems(self) -> list[str]:
        return _below("log", self, 1, "every", "val_batches") + _below(
            "log", self, 0, "val_every", "sample_tokens"
        )


@dataclass(frozen=True)
class RunConfig:
    """Everything of a run but the model, which the recipe adds.

    Args:
        dp: data-parallel ranks, replicas included; -1 takes what tp leaves of the world, auto asks the
            planner (docs/planner.md).
        tp: tensor-parallel ranks; dp × tp is the number of processes. auto: likewise.
        dp_replicate: how many of the dp ranks are replicas of each other's shards (HSDP).
        seed: of the initial weights, the order of the data and the sampled text.
        steps: optimizer updates of the whole run.
        out: run folder: config.yaml, metrics.jsonl, tensorboard/, checkpoints/.
        device: auto takes CUDA where there is one.
        freeze: globs over parameter names that are not trained; `!` before one trains it after all, and
            later ones win: ["*", "!*norm*"] trains norms only.
        activation_checkpoint: what each block computes again in backward to save memory.
        compile: compile each block with torch.compile; the first step takes longer, the others less.
        async_tp: tp's gathers and scatters overlap with the products beside them (CUDA, with compile).
        timeout_s: a collective that waits longer ends the run.
        ledger: print the collectives of the first step, by formula and as observed.
    """

    dp: int | Literal["auto"] = -1
    tp: int | Literal["auto"] = 1
    dp_replicate: int = 1
    seed: int = 0
    steps: int = 200
    out: str = "runs/run"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    async_tp: bool = False
    freeze: list[str] = field(default_factory=list)
    timeout_s: float = 600.0
    ledger: bool = False
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """dp, tp and dp_replicate, once the first two are numbers."""
        if not isinstance(self.dp, int) or not isinstance(self.tp, int):
            raise UserError(f"dp {self.dp}, tp {self.tp}: auto is for a run, not for this: give numbers")
        return self.dp, self.tp, self.dp_replicate

    def problems(self, dp: int, tp: int) -> list[str]:
        """Every rule that these values break by themselves or on this mesh."""
        found = [f"steps {self.steps} is not positive"] if self.steps < 1 else []
        found += [f"timeout_s {self.timeout_s} is not positive"] if self.timeout_s <= 0 else []
        found += [] if 0 <= self.seed < 2**63 else [f"seed {self.seed} is not in [0, 2^63)"]
        found += self.data.problems(dp, tp)
        return (
            found + self.optim.problems() + self.checkpoint.problems(self.log.val_every) + self.log.problems()
        )


def _below(section: str, values: object, least: int, *names: str) -> list[str]:
    return [
        f"{section}.{name} {value} is below {least}"
        for name in names
        if (value := getattr(values, name)) < least
    ]
