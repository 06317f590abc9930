"""The checks that kernels agree, in Triton's interpreter: they hold, and see what is planted."""

import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")


from fp8rl_jax.bench import kernel_pairs as pairs
from fp8rl_jax.bench.kernel_data import Source
from fp8rl_jax.kernels.gpu import attention as strict_attention
from fp8rl_jax.kernels.gpu import head as head_logprobs
from fp8rl_jax.kernels.gpu import matmul, norm


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, interpreter):
    for module in (matmul, norm, head_logprobs, strict_attention):
        monkeypatch.setattr(module, "triton_call", interpreter.triton_call)


@pytest.mark.slow
def test_fused_and_plain():
    source = Source(1 << 16)
    outcomes = [*pairs.check_fused(source, (200,), 70), *pairs.check_quantiser(source, (200,), 70)]
    assert len(outcomes) == 9 and all(o.ok for o in outcomes), outcomes


@pytest.mark.slow
def test_log_probabilities():
    outcomes = list(pairs.check_head(Source(1 << 16), (66, 64, 200)))
    assert len(outcomes) == 4 and all(o.ok for o in outcomes), outcomes


@pytest.mark.slow
def test_attention():
    outcomes = list(pairs.check_attention(Source(1 << 17), (1, 65), (2, 1), 64))
    assert len(outcomes) == 4 and all(o.ok for o in outcomes), outcomes


def test_attention_over_pages(monkeypatch):
    """And pages in another order than the table's are seen, by every check of them."""
    few = Source(1 << 17), (3, 70), (2, 1), 32, 5
    outcomes = list(pairs.check_pages(*few))
    assert len(outcomes) == 6 and all(o.ok for o in outcomes), outcomes
    gathered = pairs.in_one_piece
    monkeypatch.setattr(pairs, "in_one_piece", lambda x, table: gathered(x, table[:, ::-1]))
    assert not any(o.ok for o in pairs.check_pages(*few))


def test_planted_differences_are_seen(monkeypatch):
    plain = norm.rms_norm
    monkeypatch.setattr(norm, "rms_norm", lambda x, w, eps: plain(x * (x.shape[0] > 7), w, eps))
    outcomes = pairs.check_fused(Source(1 << 16), (128,), 70)
    failed = {o.case.partition(":")[0] for o in outcomes if not o.ok}
    assert failed == {"rms_norm 70 x 128"}
    shift = head_logprobs.logprobs_of_logits
    monkeypatch.setattr(
        head_logprobs, "logprobs_of_logits", lambda x, *rest: shift(x + jnp.float32(1e-6), *rest)
    )
    assert not any(o.ok for o in pairs.check_head(Source(1 << 16), (66, 64, 200)))
