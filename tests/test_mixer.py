"""The example for one's own model: on 2×2 it trains, and with the numbers of one process."""

import runpy

import pytest
import torch

from parallel2d import MeshShape, launch
from tests.ranks import ROOT, run_ranks, run_recipe

MIXER = ROOT / "recipes" / "mixer_2d.py"


def grad_norms(shape: MeshShape) -> list[float]:
    with launch.world(shape.world, "cpu", 60) as device:
        return runpy.run_path(str(MIXER))["train"](shape, device, torch.float64, steps=4)


def test_equals_one_process():
    expected = run_ranks(1, grad_norms, MeshShape())[0]
    for shape in (MeshShape(1, 2, 2), MeshShape(2, 1, 2)):
        for norms in run_ranks(4, grad_norms, shape):
            assert norms == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_the_script_learns():
    outcome = run_recipe(4, recipe=MIXER)[0]
    losses = [float(line.split("share ")[1].split(",")[0]) for line in outcome.stdout.splitlines()]
    assert losses[0] > 2 and losses[-1] < 1
