"""An unmodified mlx_lm model generates with kvant's caches exactly what it generates with the reference package's."""

import pytest

pytest.importorskip("mlx_lm", reason="pip install mlx-cpu mlx mlx-lm")
pytest.importorskip("veloxquant_mlx", reason="pip install veloxquant-mlx")

import kvant
import mlx.core as mx
from bits import assert_bits
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama, qwen3
from mlx_lm.models.cache import can_trim_prompt_cache, load_prompt_cache, save_prompt_cache, trim_prompt_cache
from veloxquant_mlx.cache.base import KVCacheConfig as TheirConfig
from veloxquant_mlx.cache.base import KVCacheFactory

LAYERS = 2
VOCABULARY = 61
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "head_dim": 16,
}
METHODS = ["kitty", "kvquant", "zipcache"]


def make_model(family, dtype, seed=3):
    """A model with random weights, large enough that greedy decoding does not fall into one token."""
    mx.random.seed(seed)
    if family == "llama":
        model = llama.Model(llama.ModelArgs(model_type="llama", **COMMON))
    else:
        more = {"max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": True}
        model = qwen3.Model(qwen3.ModelArgs(model_type="qwen3", **COMMON, **more))
    model.apply(lambda x: (mx.random.normal(x.shape) * 0.3).astype(dtype) if x.ndim > 1 else x.astype(dtype))
    mx.eval(model.parameters())
    return model


def our_caches(method):
    return [kvant.make_cache(kvant.KVCacheConfig(method=method, head_dim=16)) for _ in range(LAYERS)]


def their_caches(method):
    return [KVCacheFactory.create(TheirConfig(method=method, head_dim=16)) for _ in range(LAYERS)]


def generate(model, caches, prompt, count=24, chunk=32):
    tokens, scores = [], []
    for token, logprobs in generate_step(prompt, model, max_tokens=count, prompt_cache=caches, prefill_step_size=chunk):
        tokens.append(int(token))
        scores.append(logprobs)
    return tokens, mx.stack(scores)


def assert_same_rows(ours, theirs):
    for layer, (a, b) in enumerate(zip(ours, theirs)):
        assert a.offset == b.offset
        for got, want, name in zip(a.keys_and_values(), b.keys_and_values(), ("keys", "values")):
            assert_bits(got, want, f"{name} of layer {layer}", signed_zero=False)


@pytest.fixture(name="prompt")
def random_prompt():
    mx.random.seed(5)
    return mx.random.randint(0, VOCABULARY, (75,))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", mx.float16), ("llama", mx.bfloat16), ("llama", mx.float32), ("qwen3", mx.bfloat16)]
)
def test_generation(method, family, dtype, prompt):
    model = make_model(family, dtype)
    ours, theirs = our_caches(method), their_caches(method)
    got, want = generate(model, ours, prompt), generate(model, theirs, prompt)
    assert got[0] == want[0]
    assert len(set(got[0])) > 3, "the model says one thing only: the test would see nothing"
    assert_bits(got[1], want[1], "log probabilities")
    assert_same_rows(ours, theirs)
    assert sum(cache.nbytes for cache in ours) < sum(cache.nbytes for cache in theirs)


@pytest.mark.parametrize("method", METHODS)
def test_trim_and_continue(method, prompt):
    """Prompt caches are cut back to a common prefix and used again."""
    model = make_model("llama", mx.float16)
    ours, theirs = our_caches(method), their_caches(method)
    for caches in (ours, theirs):
        generate(model, caches, prompt, count=6)
        assert can_trim_prompt_cache(caches)
        assert trim_prompt_cache(caches, 11) == 11
    assert_same_rows(ours, theirs)
    assert generate(model, ours, prompt[:20])[0] == generate(model, theirs, prompt[:20])[0]
    assert_same_rows(ours, theirs)


@pytest.mark.parametrize("method", METHODS)
def test_speculative_decoding(method, prompt):
    """Drafted tokens come as short calls and are trimmed when they are refused."""
    model, draft = make_model("llama", mx.float16), make_model("llama", mx.float16, seed=4)
    results = []
    for caches in (our_caches(method) + our_caches(method), their_caches(method) + their_caches(method)):
        steps = speculative_generate_step(prompt, model, draft, max_tokens=16, prompt_cache=caches)
        results.append([int(token) for token, _, _ in steps])
    assert results[0] == results[1]


@pytest.mark.parametrize("method", METHODS)
def test_masks(method, prompt):
    ours, theirs = our_caches(method)[0], their_caches(method)[0]
    x = mx.random.normal((1, 2, 5, 16))
    for cache in (ours, theirs):
        cache.update_and_fetch(x, x)
    for n, arguments in (
        (1, {}),
        (4, {}),
        (4, {"return_array": True}),
        (4, {"window_size": 3}),
        (1, {"window_size": 3}),
    ):
        options = {"return_array": False, "window_size": None, **arguments}
        got, want = ours.make_mask(n, **options), theirs.make_mask(n, **options)
        if isinstance(want, mx.array):
            assert_bits(got, want)
        else:
            assert got == want


@pytest.mark.parametrize("method", METHODS)
def test_no_signal_that_mlx_lm_would_follow(method):
    cache = our_caches(method)[0]
    assert not hasattr(cache, "bits")  # would send keys to mlx's own quantized attention
    assert not hasattr(cache, "to_quantized")  # --kv-bits leaves the cache alone
    assert hasattr(cache, "merge") == hasattr(their_caches(method)[0], "merge")
    assert bool(cache)


def test_kitty_merges_into_a_plain_batch_cache_as_the_reference_does():
    mx.random.seed(1)
    lengths = (40, 33)
    rows = [mx.random.normal((1, 2, n, 16)).astype(mx.float16) for n in lengths]
    ours, theirs = [our_caches("kitty")[0] for _ in rows], [their_caches("kitty")[0] for _ in rows]
    for caches in (ours, theirs):
        for cache, x in zip(caches, rows):
            cache.update_and_fetch(x, x)
    got, want = type(ours[0]).merge(ours), type(theirs[0]).merge(theirs)
    assert type(got) is type(want)
    assert_bits(got.keys[..., : max(lengths), :], want.keys[..., : max(lengths), :])
    assert_bits(got.values[..., : max(lengths), :], want.values[..., : max(lengths), :])


@pytest.mark.parametrize("method", METHODS)
def test_prompt_cache_files(method, prompt, tmp_path):
    """mlx_lm's own save and load: generation from the file is generation from the cache, and from the package's."""
    model = make_model("llama", mx.float16)
    ours, theirs = our_caches(method), their_caches(method)
    for caches in (ours, theirs):
        generate(model, caches, prompt, count=6)
    path = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(path, ours, {"model": "test"})
    kvant.register_with_mlx_lm()
    loaded, metadata = load_prompt_cache(path, return_metadata=True)
    assert metadata == {"model": "test"} and [type(c) for c in loaded] == [type(c) for c in ours]
    assert_same_rows(loaded, theirs)
    got, want = generate(model, loaded, prompt[:20]), generate(model, theirs, prompt[:20])
    assert got[0] == want[0] == generate(model, ours, prompt[:20])[0]
    assert_bits(got[1], want[1], "log probabilities")
    assert_same_rows(loaded, theirs)
