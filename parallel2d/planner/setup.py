"""What is planned besides model and mesh: batch, checkpointing, FSDP's policy, number formats."""

from dataclasses import dataclass, field

from parallel2d.planner.model import ModelShape
from parallel2d.traffic import Reach, Step, gathered_bytes, resharding


@dataclass(frozen=True)
class NumberFormat:
    """What of a torch.dtype the formulas need."""

    name: str
    itemsize: int


FLOAT32 = NumberFormat("float32", 4)
BFLOAT16 = NumberFormat("bfloat16", 2)


@dataclass(frozen=True)
class Formats:
    """Number formats.

    Args:
        param: of weights, gradients and moments at rest.
        compute: of forward and backward.
        reduce: of the reduction of gradients.
    """

    param: NumberFormat = FLOAT32
    compute: NumberFormat = BFLOAT16
    reduce: NumberFormat = FLOAT32


@dataclass(frozen=True)
class Program:
    """Where programs that shard alike differ in what they keep; the defaults are this project.

    Args:
        logit_bytes: at the loss's peak per logit of the rank, when the logits are bfloat16: here the logits
            and their gradient.
        logit_bytes_tp: likewise where tp splits the vocabulary.
        loss_chunk: logits that the loss computes in float32 at a time.
        keeps_all_products: selective checkpointing keeps every product's result, or every second.
        fused_norms: a norm keeps its input in compute's numbers, or two float32 copies of bfloat16 (a CPU).
        dispatch_s: what the host takes to issue a block's forward and backward, on one rank and over tp.
    """

    logit_bytes: int = 4
    logit_bytes_tp: int = 4
    loss_chunk: int = 2**26
    keeps_all_products: bool = True
    fused_norms: bool = True
    dispatch_s: tuple[float, float] = (2e-3, 4e-3)


OURS = Program()
# The same on a CPU, where a trace of the real code runs.
ON_CPU = Program(fused_norms=False, loss_chunk=2**18)


@dataclass(frozen=True)
class Setup:
    """One way to run a step on a rank.

    Args:
        micro_batch: sequences per forward.
        seq_len: tokens per sequence.
        accumulation: forwards per update.
        checkpoint: none, selective or full, as given to `parallelize`.
        reshard: as `FsdpPolicy.resharding`.
        compile: each block is compiled.
        formats: of numbers.
        float8: the blocks' products are float8; memory is told as if they were not.
        async_tp: gathers and scatters over tp overlap with the products beside them.
    """

    micro_batch: int
    seq_len: int
    accumulation: int = 1
    checkpoint: str = "none"
    reshard: str | int = "auto"
    compile: bool = False
    formats: Formats = field(default_factory=Formats)
    float8: bool = False
    async_tp: bool = False

    @property
    def tokens(self) -> int:
        """Of one micro-batch, shared by tp peers."""
        return self.micro_batch * self.seq_len

    def resharding(self, shape: ModelShape, tp: int) -> str | int:
        """What `reshard` stands for."""
        of_block = gathered_bytes([shape.block(tp)], tp, self.formats.compute.itemsize)
        return resharding(self.reshard, shape.num_layers * of_block)

    def step(self, shape: ModelShape) -> Step:
        """As the ledger's formula takes it."""
        return Step(
            self.micro_batch,
            self.seq_len,
            shape.width,
            self.accumulation,
            self.formats.compute,
            self.formats.reduce,
            self.checkpoint,
            resharding=self.reshard,
            compile=self.compile,
        )


def whole_reach(shape: ModelShape) -> Reach:
    """Nothing is frozen."""
    return Reach.whole(shape.num_layers)
