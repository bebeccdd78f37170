from __future__ import annotations

import pytest
import torch
from model_list import torchvision_models

from placer.zoo import llama, llama_70b


def test_it_computes_what_transformers_llama_computes() -> None:
    # transformers imports torchvision, and fails where its compiled operators are missing
    torchvision_models()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    ours = llama(layers=2, width=32, heads=4, key_heads=2, hidden=48, vocabulary=50).double()
    ours.load_state_dict(
        {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    )
    tokens = torch.randint(50, (3, 9))
    # transformers turns in float32
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-6)


def test_a_token_does_not_see_those_behind_it() -> None:
    model = llama(layers=1, width=16, heads=2, key_heads=1, hidden=24, vocabulary=20)
    tokens = torch.randint(20, (1, 6))
    changed = tokens.clone()
    changed[0, 4:] = (tokens[0, 4:] + 1) % 20
    assert torch.equal(model(tokens)[:, :4], model(changed)[:, :4])


def test_seventy_billion_parameters_take_no_memory_on_meta() -> None:
    with torch.device("meta"):
        model = llama_70b()
    assert 68.9e9 < sum(parameter.numel() for parameter in model.parameters()) < 69.1e9


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 key heads, 4 heads and a width of 32"):
        llama(layers=1, width=32, heads=4, key_heads=3, hidden=8, vocabulary=8)
