"""Checkpoints by torch.distributed.checkpoint that load on any mesh."""
