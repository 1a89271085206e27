"""`kvant info`: geometry from GGUF metadata, bytes per term, and agreement with a live run."""

import json
import os
import subprocess

import pytest
from conftest import KVANT
from gguf_file import gguf_bytes, llama

OK, CHILD, USAGE, BAD_INPUT, IO, UNSUPPORTED = range(6)


@pytest.fixture(name="info")
def info_json(kvant, tmp_path):
    """`kvant info --json` for a model with this metadata."""

    def run(metadata, *arguments):
        path = tmp_path / "model.gguf"
        path.write_bytes(metadata if isinstance(metadata, bytes) else gguf_bytes(metadata))
        done = kvant("info", "-m", path, "--json", *arguments)
        return done, json.loads(done.stdout) if done.returncode == OK else None

    return run


def rows(result):
    return {row["recipe"].split(":")[0] if not row["recipe"].startswith("stock") else row["recipe"]: row
            for row in result["recipes"]}  # fmt: skip


def test_machine(kvant):
    text = kvant("info").stdout
    result = json.loads(kvant("info", "--json").stdout)
    assert result["kernel"] in result["kernels"] and result["kernels"][-1] == "scalar"
    assert {"f16", "kivi", "kitty"} <= {method["name"] for method in result["methods"]}
    assert [preset["name"] for preset in result["presets"]] == ["small", "balanced", "near-lossless"]
    for method in result["methods"]:
        assert method["default_recipe"] in text
    for preset in result["presets"]:
        assert preset["recipe"] in text


def test_forced_kernel(kvant):
    assert json.loads(kvant("info", "--json", env={"KVANT_KERNEL": "scalar"}).stdout)["kernel"] == "scalar"
    assert kvant("info", env={"KVANT_KERNEL": "abacus"}).returncode == USAGE


def test_f16_bytes_are_the_formula(info):
    _, result = info(llama(), "-c", 1024)
    assert rows(result)["stock:f16"]["kv_bytes"] == 4 * 2 * (64 + 64) * 1024 * 2
    assert result["layer_groups"] == [{"layers": 4, "kv_heads": 2, "key_dim": 64, "value_dim": 64, "window": 0}]


def test_terms_add_up_and_shrink(info):
    _, result = info(llama(), "-c", 8192, "--recipes", "f16,kivi:k=4,v=4,kitty")
    for row in result["recipes"]:
        assert row["kv_bytes"] == row["sealed"] + row["window"] + row["sinks"] + row["tables"]
    found = rows(result)
    assert found["kitty"]["kv_bytes"] < found["kivi"]["kv_bytes"] < 0.33 * found["f16"]["kv_bytes"]
    assert found["kitty"]["sinks"] > 0 and found["kivi"]["sinks"] == 0
    # Each of 4 layers keeps one page open, and one reads a micro-batch of 512 tokens: 8 or 9 pages of 4 * 64.
    assert found["kivi"]["window"] <= found["f16"]["window"] * 9 / 256
    assert found["kivi"]["bits_asymptotic"] == pytest.approx(4.375, abs=0.01)


def test_context_defaults_to_training(info):
    _, result = info(llama())
    assert result["context"] == 4096


def test_per_layer_heads_and_recurrent_layers(info):
    _, result = info(llama(llama__attention__head_count_kv=[2, 0, 4, 0]), "-c", 256)
    assert [(g["layers"], g["kv_heads"]) for g in result["layer_groups"]] == [(1, 2), (1, 4)]


def test_explicit_key_and_value_length(info):
    _, result = info(llama(llama__attention__key_length=192, llama__attention__value_length=128), "-c", 256)
    group = result["layer_groups"][0]
    assert (group["key_dim"], group["value_dim"]) == (192, 128)


def gemma(**changes):
    metadata = {key.replace("llama.", "gemma3."): value for key, value in llama(**changes).items()}
    metadata["general.architecture"] = "gemma3"
    metadata["gemma3.block_count"] = 12
    metadata["gemma3.attention.sliding_window"] = 512
    return metadata


def test_sliding_window_layers_are_bounded(info):
    _, result = info(gemma(), "-c", 8192)
    assert [(g["layers"], g["window"]) for g in result["layer_groups"]] == [(5, 512), (1, 0), (5, 512), (1, 0)]
    per_cell = 2 * (64 + 64) * 2
    assert rows(result)["stock:f16"]["kv_bytes"] == per_cell * (10 * 1024 + 2 * 8192)


def test_sliding_window_pattern_as_array(info):
    metadata = gemma()
    metadata["gemma3.attention.sliding_window_pattern"] = [True] * 6 + [False] * 6
    _, result = info(metadata, "-c", 8192)
    assert [(g["layers"], g["window"]) for g in result["layer_groups"]] == [(6, 512), (6, 0)]


def test_unknown_window_pattern_is_said(info):
    metadata = llama(llama__attention__sliding_window=512)
    _, result = info(metadata, "-c", 1024)
    assert any("sliding window" in note for note in result["notes"])


def test_shared_layers_do_not_count(info):
    _, result = info(llama(llama__attention__shared_kv_layers=3), "-c", 256)
    assert result["layer_groups"][0]["layers"] == 1


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"general__architecture": None}, BAD_INPUT, "architecture"),
        ({"llama__block_count": None}, BAD_INPUT, "block_count"),
        ({"llama__block_count": 0}, BAD_INPUT, "block_count"),
        ({"llama__block_count": 4000000000}, BAD_INPUT, "block_count"),
        ({"llama__attention__head_count": 3.5}, BAD_INPUT, "head_count"),
        ({"llama__attention__head_count_kv": [1, 2]}, BAD_INPUT, "head_count_kv"),
        ({"llama__attention__head_count_kv": "two"}, BAD_INPUT, "head_count_kv"),
        ({"llama__embedding_length": None}, BAD_INPUT, "head size"),
        ({"llama__attention__head_count_kv": 0}, UNSUPPORTED, "KV cache"),
        ({"llama__attention__kv_lora_rank": 512}, UNSUPPORTED, "MLA"),
    ],
)
def test_bad_metadata(info, change, code, words):
    done, _ = info(llama(**change), "-c", 256)
    assert done.returncode == code
    assert words in done.stderr and not done.stdout


def test_every_truncation_is_refused(info):
    whole = gguf_bytes(llama())
    for length in range(0, len(whole), 7):
        done, _ = info(whole[:length])
        assert done.returncode == BAD_INPUT, length


def test_not_gguf(kvant, info, tmp_path):
    assert info(b"PK\x03\x04" + bytes(100))[0].returncode == BAD_INPUT
    assert info(gguf_bytes(llama(), version=1))[0].returncode == BAD_INPUT
    assert kvant("info", "-m", tmp_path).returncode == BAD_INPUT
    assert kvant("info", "-m", tmp_path / "nothing").returncode == IO


def test_huge_counts_are_refused_without_allocating(info):
    whole = bytearray(gguf_bytes(llama()))
    position = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    whole[position : position + 8] = b"\xff" * 8
    assert info(bytes(whole))[0].returncode == BAD_INPUT
    whole[16:24] = b"\xff" * 8
    assert info(bytes(whole))[0].returncode == BAD_INPUT


@pytest.mark.parametrize("recipe", ["f16", "kivi:k=4,v=4", "kivi:k=2,v=2,page=32,window=0", "kitty", "waterfill"])
def test_estimate_agrees_with_a_live_run(kvant, model, text, tmp_path, recipe):
    """Within 1 % of what the plug-in holds once the context is full."""
    status_path = tmp_path / "status.json"
    context = 512  # sealed pages, the window, and sinks
    done = kvant("run", "--recipe", recipe, "--status", status_path, "--", "llama-perplexity", "-m", model, "-f", text,
                 "-c", context, "-b", context, "-ub", 128, "--chunks", 1, "-fa", "on")  # fmt: skip
    assert done.returncode == OK, done.stderr
    status = json.loads(status_path.read_text())
    result = json.loads(kvant("info", "-m", model, "-c", context, "--ubatch", 128, "--json", "--recipes",
                              recipe).stdout)  # fmt: skip
    estimate = result["recipes"][1]
    assert estimate["kv_bytes"] == pytest.approx(status["kv_bytes_at_peak_cells"], rel=0.01)
    assert estimate["bits"] == pytest.approx(status["bits_per_value"], rel=0.01)
    assert estimate["bits_asymptotic"] == pytest.approx(status["bits_asymptotic"], rel=0.001)


def test_output_into_a_closed_pipe_ends(model):
    command = f"'{KVANT}' info -m '{os.fspath(model)}' -c 100 | true"
    assert subprocess.run(["bash", "-c", command], timeout=20, check=False, stderr=subprocess.PIPE).returncode == 0


def test_rules_go_by_the_layers_of_the_model(kvant, tmp_path):
    """Layers without KV heads have numbers too: the plug-in sees layer 3 of this model, and no layer 0."""
    file = tmp_path / "hybrid.gguf"
    file.write_bytes(gguf_bytes(llama(llama__attention__head_count_kv=[0, 0, 0, 2])))
    for layer, sealed in ((0, False), (3, True)):
        done = kvant("info", "-m", file, "-c", 4096, "--json", "--recipes", f"layers={layer}:kivi,*:f16")
        assert done.returncode == 0, done.stderr
        assert (json.loads(done.stdout)["recipes"][1]["sealed"] > 0) == sealed
