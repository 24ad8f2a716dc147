"""A few float64 steps of a small Llama, for tests that compare meshes and policies."""

from dataclasses import dataclass
from typing import Any

import torch
from parallel2d.models.llama import Llama, LlamaConfig
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d import FsdpPolicy, MeshShape, Precision, build_mesh, freeze, init_weights, launch, parallelize
from parallel2d.loss import VocabShard
from parallel2d.mesh import dp_rank, dp_size
from parallel2d.optim import build_optimizer
from parallel2d.step import evaluate, train_step
from tests.ranks import run_ranks

FLOAT64 = Precision(torch.float64, torch.float64, torch.float64)
# Of large models; auto keeps so small ones whole.
BUT_LAST = FsdpPolicy("but_last")


@dataclass(frozen=True)
class Case:
    """What a run differs in."""

    policy: FsdpPolicy = BUT_LAST
    sync: str = "every"
    frozen: tuple[str, ...] = ()
    tied: bool = False
    layers: int = 2


@dataclass
class Run:
    model: Llama
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    case: Case

    @classmethod
    def begin(cls, mesh: DeviceMesh, case: Case) -> "Run":
        # Sizes that no axis divides.
        config = LlamaConfig(61, 36, case.layers, 6, 6, 0, 50, tie_embeddings=case.tied)
        with torch.device("meta"):
            model = Llama(config)
        freeze(model, case.frozen)
        units = list(model.blocks)
        parallelize(model, mesh, plan=model.tp_plan(), units=units, precision=FLOAT64, fsdp=case.policy)
        init_weights(model, torch.device("cpu"), 0)
        return cls(model, build_optimizer(model, 1e-2, (0.9, 0.95), 0.1), mesh, case)

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's three micro-batches of a global batch of 12 × 8 tokens."""
        tokens = torch.randint(61, (12, 9), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(dp_size(self.mesh))[dp_rank(self.mesh)]
        return [(part[:, :-1], part[:, 1:]) for part in mine.chunk(3)]

    def train(self, first: int, last: int) -> list[float]:
        """Loss, gradient norm and validation loss of each step."""
        vocab, numbers = VocabShard.of(61, self.mesh["tp"]), []
        for step in range(first, last):
            stats = train_step(
                self.model, self.batches(step), self.optimizer, vocab, self.mesh, 1.0, self.case.sync
            )
            numbers += [stats.loss, stats.grad_norm, evaluate(self.model, self.batches(99), vocab, self.mesh)]
        return numbers

    def weights(self) -> dict[str, Tensor]:
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in self.model.named_parameters()
        }


def _curves(shape: MeshShape, cases: list[Case]) -> list[dict[str, Any]]:
    with launch.world(shape.world, "cpu", 60):
        mesh = build_mesh(shape, "cpu")
        found = []
        for case in cases:
            run = Run.begin(mesh, case)
            before = run.weights()
            found.append({"numbers": run.train(0, 2), "before": before, "after": run.weights()})
        return found


def curves(shape: MeshShape, *cases: Case) -> list[dict[str, Any]]:
    """For each case the numbers of two steps and the whole weights before and after, as rank 0 has them."""
    return run_ranks(shape.world, _curves, shape, list(cases))[0]


def assert_same(ours: dict[str, Any], reference: dict[str, Any]) -> None:
    """To 1e-9: losses, norms and weights."""
    torch.testing.assert_close(
        torch.tensor(ours["numbers"], dtype=torch.float64),
        torch.tensor(reference["numbers"], dtype=torch.float64),
        rtol=1e-9,
        atol=0,
    )
    for name, weight in reference["after"].items():
        assert (ours["after"][name] - weight).norm() <= 1e-9 * weight.norm(), name
