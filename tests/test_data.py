"""One global order, each sequence once per epoch, the same on every mesh."""

import numpy as np
import pytest
import torch

from parallel2d import UserError
from parallel2d.data import Corpus, RankData, load_tokens

CPU = torch.device("cpu")


def corpus(size: int = 1000, seq_len: int = 7, seed: int = 0) -> Corpus:
    return Corpus(np.arange(size) % 997, seq_len, vocab_size=1000, val_fraction=0.1, seed=seed)


def step_rows(data: Corpus, position: int, dp: int, micro_batch: int) -> list[list[int]]:
    """The global batch as the ranks see it, in rank order."""
    ranks = [RankData(data, 12, micro_batch, rank, dp, CPU) for rank in range(dp)]
    return [row for rank in ranks for ids, _ in rank.train_step(position) for row in ids.tolist()]


def test_the_global_order_does_not_depend_on_the_mesh():
    reference = step_rows(corpus(), 24, dp=1, micro_batch=12)
    for dp, micro_batch in ((2, 6), (2, 1), (4, 3), (12, 1)):
        assert step_rows(corpus(), 24, dp, micro_batch) == reference


def test_each_sequence_once_per_epoch_and_another_order_in_the_next():
    data = corpus()
    firsts = [data.train_batch(range(p, p + 1))[0][0, 0].item() for p in range(2 * data.num_train)]
    first_epoch, second_epoch = firsts[: data.num_train], firsts[data.num_train :]
    assert sorted(first_epoch) == sorted(second_epoch) == [i * 7 for i in range(data.num_train)]
    assert first_epoch != second_epoch
    assert first_epoch != [
        corpus(seed=1).train_batch(range(p, p + 1))[0][0, 0].item() for p in range(data.num_train)
    ]


def test_targets_are_the_next_tokens_and_validation_is_apart():
    data = corpus()
    ids, targets = data.train_batch(range(5))
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    last = max(data.train_batch(range(p, p + 1))[1].max().item() for p in range(data.num_train))
    assert last < data.split <= data.val_batch(range(1))[0].min().item()
    assert torch.equal(data.val_batch(range(1))[0], data.val_batch(range(data.num_val, data.num_val + 1))[0])


def test_unigram_loss_is_the_cross_entropy_of_the_frequencies():
    tokens = np.array([0, 0, 0, 1] * 100)
    counts = np.array([270 + 1, 90 + 1])
    expected = -(0.75 * np.log(counts[0] / counts.sum()) + 0.25 * np.log(counts[1] / counts.sum()))
    assert Corpus(tokens, 4, 2, 0.1, 0).unigram_loss() == pytest.approx(expected, rel=1e-12)


def test_token_files(tmp_path):
    tokens = np.arange(100, dtype=np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", tokens.astype(np.int32))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.txt").write_bytes(b"cd")
    (tmp_path / "folder" / "a.txt").write_bytes(b"ab")
    assert load_tokens(str(tmp_path / "a.bin")).tolist() == tokens.tolist()
    assert load_tokens(str(tmp_path / "a.npy")).tolist() == tokens.tolist()
    assert bytes(load_tokens(str(tmp_path / "folder"))) == b"abcd"
    assert len(load_tokens(None)) > 5_000_000


def test_bad_data_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_tokens(str(tmp_path / "nothing"))
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="is empty"):
        load_tokens(str(tmp_path / "empty"))
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match="odd number of bytes"):
        load_tokens(str(tmp_path / "odd.bin"))
    (tmp_path / "text.npy").write_bytes(b"abc")
    with pytest.raises(UserError, match=r"is not a \.npy file"):
        load_tokens(str(tmp_path / "text.npy"))
    with pytest.raises(UserError, match="does not exist"):
        load_tokens("")
    np.save(tmp_path / "a.npy", np.zeros((2, 2)))
    with pytest.raises(UserError, match="not 1-D integer tokens"):
        load_tokens(str(tmp_path / "a.npy"))
    with pytest.raises(UserError, match="give more text"):
        corpus(size=20, seq_len=30)
    outside = Corpus(np.full(100, 300), 4, 256, 0.1, 0)
    with pytest.raises(UserError, match=r"token 300, outside model.vocab_size 256"):
        outside.train_batch(range(1))
    with pytest.raises(UserError, match="token 300, outside"):
        outside.unigram_loss()


def test_the_fingerprint_tells_data_apart():
    prints = {
        corpus().fingerprint(),
        corpus(seed=1).fingerprint(),
        corpus(seq_len=8).fingerprint(),
        corpus(size=999).fingerprint(),
    }
    assert len(prints) == 4
    assert corpus().fingerprint() == corpus().fingerprint()


def test_prompts_and_text_of_any_vocabulary():
    text = Corpus(np.frombuffer(b"some text " * 9, dtype=np.uint8), 4, 300, 0.1, 0)
    assert text.prompt("ab") == [97, 98]
    assert text.decode([97, 299, 98]) == "a?b"
    digits = Corpus(np.frombuffer(b"0123" * 90, dtype=np.uint8), 4, 64, 0.1, 0)
    assert max(digits.prompt("ab")) < 64
    assert corpus().decode([5, 6]) == "5 6" and len(corpus().prompt("ab")) == 16
