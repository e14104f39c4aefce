"""The zoo: published sizes, the three phases, and errors in one sentence."""

import subprocess
import sys

import pytest
import torch

from rooftile import zoo
from rooftile.errors import UsageError

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}


@pytest.fixture(params=["gpt2", "llama"])
def small(request):
    torch.manual_seed(0)
    if request.param == "gpt2":
        return zoo.GPT2(
            zoo.gpt2_config(n_layers=2, n_heads=4, d_model=32, vocab=61, positions=24, dropout=0.0)
        ).double()
    config = zoo.llama_config(n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_ff=48, vocab=61, positions=24)
    return zoo.Llama(config).double()


def empty_cache(config, batch, length):
    shape = (batch, config.n_kv_heads, length, config.head_dim)
    return tuple((torch.zeros(shape).double(), torch.zeros(shape).double()) for _ in range(config.n_layers))


def test_every_published_name_is_listed():
    assert zoo.names() == list(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    step = zoo.build(name, seq=8)
    assert sum(p.numel() for p in step.model.parameters()) == PUBLISHED[name]
    assert all(p.is_meta for p in step.model.parameters())


def test_names_and_configs_need_no_torch():
    code = "import sys; from rooftile import zoo; zoo.config('gpt2'); zoo.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("name", "positions"), [("gpt2", 1024), ("llama-3.1-8b", 131072), ("llama-3.1-405b", 131072)])
def test_default_sequence_is_4096_or_what_the_positions_allow(name, positions):
    assert zoo.config(name).positions == positions
    assert zoo.build(name).seq == min(4096, positions)
    assert zoo.build(name, phase="decode").seq == min(4096, positions - 1)


def test_gpt2_ties_its_head_and_llama_does_not():
    gpt2, llama = zoo.build("gpt2").model, zoo.build("llama-3.1-8b").model
    assert gpt2.lm_head.weight is gpt2.wte.weight
    assert llama.output.weight is not llama.tok_embeddings.weight


def test_dropout_is_as_published():
    gpt2 = zoo.build("gpt2").model
    assert {m.p for m in gpt2.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}
    assert sum(isinstance(m, torch.nn.Dropout) for m in gpt2.modules()) == 1 + 2 * 12
    assert gpt2.blocks[0].attn.attn_dropout == 0.1
    assert not any(isinstance(m, torch.nn.Dropout) for m in zoo.build("llama-3.1-8b", seq=8).model.modules())


@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-8b"])
def test_a_training_step_runs_forward_and_backward_on_meta(name):
    step = zoo.build(name, batch=2, seq=16)
    logits = step.model(**step.inputs)
    assert logits.shape == (2, 16, step.config.vocab)
    loss = step.loss(logits)
    loss.backward()
    assert loss.shape == ()
    assert all(p.grad is not None for p in step.model.parameters())
    assert step.model.training


@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-8b"])
def test_prefill_and_decode_fill_the_cache_that_was_passed(name):
    for phase, length in (("prefill", 16), ("decode", 17)):
        step = zoo.build(name, batch=2, seq=16, phase=phase, dtype=torch.bfloat16, kv_dtype=torch.float16)
        cache = step.inputs["kv_cache"]
        assert len(cache) == step.config.n_layers
        assert cache[0][0].shape == (2, step.config.n_kv_heads, length, step.config.head_dim)
        assert cache[0][1].dtype == torch.float16
        logits, returned = step.model(**step.inputs)
        assert logits.shape == (2, 1, step.config.vocab)
        assert returned is cache
        assert step.loss is None
        assert not step.model.training


def test_prefill_then_decode_equals_the_whole_sequence(small):
    tokens = torch.randint(61, (2, 9))
    whole = small.eval()(tokens)
    prompt = empty_cache(small.config, 2, 8)
    logits, prompt = small(tokens[:, :8], kv_cache=prompt)
    torch.testing.assert_close(logits[:, 0], whole[:, 7], rtol=1e-12, atol=1e-12)
    cache = empty_cache(small.config, 2, 9)
    for (k, v), (k8, v8) in zip(cache, prompt, strict=True):
        k[:, :, :8], v[:, :, :8] = k8, v8
    logits, _ = small(tokens[:, 8:], kv_cache=cache)
    torch.testing.assert_close(logits[:, 0], whole[:, 8], rtol=1e-12, atol=1e-12)


def test_no_position_sees_a_later_token(small):
    tokens = torch.randint(61, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 61
    before, after = small.eval()(tokens), small(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])


def test_two_tokens_against_a_longer_cache_are_refused(small):
    with pytest.raises(UsageError, match="2 tokens against a cache of 9"):
        small(torch.zeros(1, 2, dtype=torch.int64), kv_cache=empty_cache(small.config, 1, 9))


def test_initial_loss_is_that_of_a_uniform_guess():
    torch.manual_seed(0)
    model = zoo.GPT2(zoo.gpt2_config(n_layers=2, n_heads=4, d_model=64, vocab=97, positions=32))
    tokens = torch.randint(97, (4, 32))
    loss = zoo.NextTokenLoss(torch.randint(97, (4, 32)))(model(tokens))
    assert abs(loss.item() - torch.log(torch.tensor(97.0)).item()) < 0.1


def test_published_initialisation_scales_the_residual_projections():
    torch.manual_seed(0)
    model = zoo.GPT2(zoo.gpt2_config(n_layers=8, n_heads=4, d_model=128, vocab=500))
    # 128 x 128 elements: the standard deviation's own error is 0.55 %, so 3 % is above five of them.
    assert model.blocks[3].attn.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert model.blocks[3].attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.wpe.weight.std().item() == pytest.approx(0.01, rel=0.03)
    assert model.blocks[0].mlp.c_fc.bias.abs().max() == 0
    assert (model.ln_f.weight == 1).all()


def test_rotary_tables_cover_the_sequence_in_use_and_stay_fp32():
    model = zoo.build("llama-3.1-8b", seq=100, phase="decode", dtype=torch.bfloat16).model
    assert model.rope_cos.shape == (101, 64)
    assert model.rope_cos.dtype == torch.float32
    assert model.output.weight.dtype == torch.bfloat16
    assert "rope_cos" not in model.state_dict()


def test_rotary_tables_do_not_promote_16_bit_activations():
    from rooftile.zoo.llama import rotate

    q = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16)
    assert rotate(q, torch.ones(4, 4), torch.zeros(4, 4)).dtype == torch.bfloat16


def test_rotary_frequencies_agree_with_transformers():
    from transformers import LlamaConfig as Published
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from rooftile.zoo.llama import rope_frequencies

    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    published = Published(
        hidden_size=4096, num_attention_heads=32, max_position_embeddings=131072,
        rope_theta=500000.0, rope_scaling=rope,
    )  # fmt: skip
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](published, "cpu")
    torch.testing.assert_close(rope_frequencies(zoo.config("llama-3.1-8b")), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "gpt3"}, "unknown model 'gpt3'.*gpt2"),
        ({"name": "llama"}, "llama-3.1-8b, llama-3.1-70b"),
        ({"name": "gpt2", "seq": 1025}, "seq is 1025, but gpt2 has 1024 positions; use 1024 or less"),
        ({"name": "gpt2", "seq": 1024, "phase": "decode"}, "the new token takes; use 1023 or less"),
        ({"name": "gpt2", "seq": 0}, "seq is 0"),
        ({"name": "gpt2", "batch": 0}, "batch is 0; it has to be 1 or more"),
        ({"name": "gpt2", "phase": "serve"}, "unknown phase 'serve'; choose one of train, prefill, decode"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    with pytest.raises(UsageError, match=message) as error:
        zoo.build(**arguments)
    assert "\n" not in str(error.value)


def test_building_leaves_the_default_dtype_as_it_was():
    zoo.build("gpt2", dtype=torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
