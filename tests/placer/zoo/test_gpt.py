from __future__ import annotations

import math

import pytest
import torch

from placer.zoo.gpt import CausalSelfAttention, gpt


def small(**changes: object) -> torch.nn.Module:
    sizes = {"layers": 2, "width": 16, "heads": 4, "context": 12, "vocabulary": 31, **changes}
    return gpt(**sizes)  # type: ignore[arg-type]


def test_logits_have_one_row_a_token() -> None:
    assert small()(torch.randint(0, 31, (3, 7))).shape == (3, 7, 31)


def test_a_token_does_not_see_those_after_it() -> None:
    model = small().double().eval()
    tokens = torch.randint(0, 31, (2, 9))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 31
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-12)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-6


def test_attention_equals_the_formula_written_out() -> None:
    attention = CausalSelfAttention(width=8, heads=2).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    query, key, value = (
        part.view(2, 5, 2, 4).transpose(1, 2) for part in attention.qkv(x).split(8, dim=-1)
    )
    scores = query @ key.transpose(-1, -2) / math.sqrt(4)
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    expected = attention.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 5, 8))
    torch.testing.assert_close(attention(x), expected, rtol=1e-12, atol=1e-12)


def test_tied_embeddings_are_one_parameter() -> None:
    model = small(tied=True)
    assert model.head.weight is model.token_embedding.weight
    assert len(list(small().parameters())) == len(list(model.parameters())) + 1


def test_tied_defaults_have_the_size_of_gpt2() -> None:
    with torch.device("meta"):
        model = gpt(tied=True)
    # transformers' GPT2LMHeadModel
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_a_width_that_the_heads_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="width of 10 cannot be shared evenly by 4 heads"):
        small(width=10)
