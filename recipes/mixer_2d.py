"""Your own model in your own loop: an MLP-Mixer (arXiv:2105.01601) on a dp 2 × tp 2 mesh.

torchrun --nproc-per-node 4 recipes/mixer_2d.py   (or: python recipes/mixer_2d.py)

The model is plain PyTorch and knows nothing of parallel2d. Three lines make it 2D: a plan, the list
of blocks, and the call of parallelize().
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from parallel2d import Precision, build_mesh, clip_gradients, gradient_norm, init_weights, launch, parallelize
from parallel2d.mesh import MeshShape, dp_rank, dp_size


class Mlp(nn.Module):
    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, hidden), nn.Linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix_patches, self.mix_channels = Mlp(patches, 2 * patches), Mlp(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:  # (b, n, d) -> (b, n, d)
        x = x + rearrange(self.mix_patches(rearrange(self.norm1(x), "b n d -> b d n")), "b d n -> b n d")
        return x + self.mix_channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(16, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:  # (b, 16, 16) -> (b, classes)
        x = self.embed(rearrange(images, "b (h p) (w q) -> b (h w) (p q)", p=4, q=4))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


# Each MLP is split over tp: `up` by its outputs, `down` by its inputs. The rest stays whole.
PLAN = {"blocks.*.mix_*.up": "colwise", "blocks.*.mix_*.down": "rowwise"}


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    """A global batch, the same on every rank: one of ten fixed patterns under noise."""
    patterns = torch.randn(10, 16, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(step + 1)
    labels = torch.randint(10, (size,), generator=generator)
    return patterns[labels] + 2 * torch.randn(size, 16, 16, generator=generator), labels


def train(shape: MeshShape, device: torch.device, dtype: torch.dtype, steps: int) -> list[float]:
    mesh = build_mesh(shape, device.type)
    with torch.device("meta"):
        model = Mixer()
    parallelize(model, mesh, plan=PLAN, units=list(model.blocks), precision=Precision(dtype, dtype, dtype))
    init_weights(model, device, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(steps):
        images, labels = (part.chunk(dp_size(mesh))[dp_rank(mesh)].to(device) for part in batch(step, 64))
        loss = F.cross_entropy(model(images.to(dtype)), labels)
        loss.backward()  # gradients are means over dp, as with DDP and FSDP
        norm = gradient_norm(model.parameters())
        clip_gradients(model.parameters(), norm, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm.item())
        if step % 20 == 0 or step == steps - 1:
            launch.say(f"step {step}: loss of rank 0's share {loss.item():.4f}, grad_norm {norm.item():.4f}")
    return norms


def main() -> None:
    shape = MeshShape(dp_shard=2, tp=2)
    with launch.world(shape.world, "auto", timeout_s=600) as device:
        train(shape, device, torch.float32, steps=60)


if __name__ == "__main__":
    launch.run(main)
