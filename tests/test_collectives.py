"""A tensor split over both axes, unevenly, is put together again bit by bit."""

import pytest
import torch
from torch import Tensor, nn

from parallel2d import MeshShape, Precision, build_mesh, launch, parallelize
from parallel2d.collectives import gather_whole
from tests.ranks import run_ranks


class Uneven(nn.Module):
    """61 rows by tp 2 are 31 and 30, by dp 3 then 11, 11, 9 and 10 each; 7 rows by dp 3 are 3, 3, 1."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns, self.few = nn.Embedding(61, 3), nn.Linear(4, 7), nn.Linear(2, 2)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                generator = torch.Generator().manual_seed(number)
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            self.rows.weight[::7] = -0.0  # a sum would turn it into 0.0


PLAN = {"rows": "vocab", "columns": "rowwise", "few": "replicated"}


def gathered(shape: MeshShape, dtype: torch.dtype) -> dict[str, Tensor]:
    with launch.world(shape.world, "cpu", 60):
        model = Uneven()
        precision = Precision(dtype, dtype, dtype)
        parallelize(model, build_mesh(shape, "cpu"), plan=PLAN, units=[], precision=precision)
        return {name: gather_whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(MeshShape(1, 3, 2), torch.float64), (MeshShape(2, 2, 1), torch.bfloat16)],
    ids=str,
)
def test_gather_whole_is_bitwise(shape, dtype):
    expected = {name: p.detach().to(dtype) for name, p in Uneven().named_parameters()}
    for ours in run_ranks(shape.world, gathered, shape, dtype):
        assert ours.keys() == expected.keys()
        for name, whole in expected.items():
            assert torch.equal(ours[name], whole) and torch.equal(ours[name].signbit(), whole.signbit()), name
            assert not ours[name].requires_grad
    assert torch.equal(gather_whole(expected["rows.weight"]), expected["rows.weight"])
