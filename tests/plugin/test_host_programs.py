"""llama-perplexity, llama-bench and a recurrent model: stock programs, judged by their own figures."""

import json

import pytest
import tiny_models
from conftest import kvant_lines, mean_kld, read_status, run_host, run_python

# Nats by which any change of arithmetic may move a model: one with 16-bit weights, and one with 4-bit weights, where the
# host rounds activations to 8 bits.
NOISE = 0.001
NOISE_Q4 = 0.009


@pytest.fixture(scope="module", name="smollm2_base")
def base_logits(smollm2_f16, text, tmp_path_factory):
    return base_of(smollm2_f16, text, tmp_path_factory.mktemp("base") / "base.kld")


def quality_arguments(model, text, base):
    return ["-m", model, "-f", text, "-c", 512, "-b", 512, "-ub", 128, "--chunks", 2, "-fa", "on", "-t", 2,
            "--kl-divergence-base", base]  # fmt: skip


def base_of(model, text, base):
    run_host("llama-perplexity", *quality_arguments(model, text, base))
    return base


@pytest.mark.xdist_group("base")
def test_f16_recipe_is_within_the_noise(smollm2_f16, smollm2_base, text, tmp_path):
    status = tmp_path / "status.json"
    arguments = [*quality_arguments(smollm2_f16, text, smollm2_base), "--kl-divergence"]
    _, output = run_host("llama-perplexity", *arguments, recipe="f16", KVANT_STATUS=str(status))
    assert mean_kld(output) < NOISE
    assert not kvant_lines(output)
    held = read_status(status)
    assert held["recipe"] == "f16" and held["bits_asymptotic"] == 16.0
    assert held["cells_written"] == 512 * 30
    assert held["f16_bytes"] == 512 * 30 * 3 * 128 * 2


@pytest.mark.xdist_group("base")
def test_status_adds_up(smollm2_f16, smollm2_base, text, tmp_path):
    status = tmp_path / "status.json"
    arguments = [*quality_arguments(smollm2_f16, text, smollm2_base), "--kl-divergence"]
    recipe = "kivi:k=4,v=4,window=64"
    _, output = run_host("llama-perplexity", *arguments, recipe=recipe, KVANT_STATUS=str(status))
    assert mean_kld(output) < 0.03
    held = read_status(status)
    assert held["host"]["api"] == 2 and held["threads"] == 2
    assert held["values"] == held["cells_written"] * 3 * 128
    layers = held["layers"]
    parts = ("sealed_bytes", "open_bytes", "exact_bytes", "table_bytes")
    assert held["kv_bytes"] >= sum(layer[p] for layer in layers for p in parts)
    assert held["kv_bytes_peak"] >= held["kv_bytes_at_peak_cells"] > 0
    assert held["bits_per_value"] == pytest.approx(8 * held["kv_bytes_at_peak_cells"] / held["values"])
    assert all(layer["sealed_pages"] == 3 and layer["seals"] >= 3 for layer in layers)
    assert held["kv_bytes"] < 0.6 * held["f16_bytes"]


def test_sliding_window_model(gemma, text, tmp_path):
    base = base_of(gemma, text, tmp_path / "base.kld")
    status = tmp_path / "status.json"
    arguments = [*quality_arguments(gemma, text, base), "--kl-divergence"]
    _, output = run_host("llama-perplexity", *arguments, recipe="f16", KVANT_STATUS=str(status))
    assert mean_kld(output) < NOISE_Q4
    layers = read_status(status)["layers"]
    assert len(layers) == 18 and all(layer["key_dim"] == 256 for layer in layers)


def test_bench(smollm2, tmp_path):
    status = tmp_path / "status.json"
    arguments = ["-m", smollm2, "-p", 64, "-n", 4, "-d", 256, "-fa", 1, "-r", 1, "-t", 2, "-o", "json"]
    _, output = run_host("llama-bench", *arguments, recipe="kivi:window=32", KVANT_STATUS=str(status))
    rows = json.loads(output[output.index("[") : output.rindex("]") + 1])
    assert len(rows) == 2 and all("KVANT" in row["backends"] and row["avg_ts"] > 0 for row in rows)
    assert sum(layer["sealed_pages"] for layer in read_status(status)["layers"]) > 0


def test_layers_have_their_own_recipes(smollm2, tmp_path):
    status = tmp_path / "status.json"
    arguments = ["-m", smollm2, "-p", 256, "-n", 0, "-fa", 1, "-r", 1, "-t", 2, "-ub", 128]
    run_host("llama-bench", *arguments, recipe="layers=0-1:f16,7:kivi:k=2,v=2,window=0,*:kivi:window=0", KVANT_STATUS=str(status))
    recipes = [layer["recipe"].split(",s")[0] for layer in read_status(status)["layers"]]
    assert recipes == ["f16"] * 2 + ["kivi:k=4,v=4"] * 5 + ["kivi:k=2,v=2"] + ["kivi:k=4,v=4"] * 22
    sealed = [layer["sealed_bytes"] for layer in read_status(status)["layers"]]
    assert sealed[0] == 0 and 1.7 < sealed[2] / sealed[7] < 1.9


def test_weights_stay_mapped_from_the_file(smollm2):
    """The device offers memory for caches only; a weight in it would be a copy of the mapped file."""
    arguments = ["-m", smollm2, "-p", 8, "-n", 0, "-fa", 1, "-r", 1, "-t", 2, "-v"]
    _, output = run_host("llama-bench", *arguments, recipe="kivi")
    buffers = {line.split()[1] for line in output.splitlines() if "model buffer size" in line}
    assert buffers == {"CPU_Mapped"}


def test_status_on_stderr_is_one_line(smollm2):
    arguments = ["-m", smollm2, "-p", 8, "-n", 0, "-fa", 1, "-r", 1, "-t", 2]
    _, output = run_host("llama-bench", *arguments, recipe="kivi", KVANT_STATUS="stderr")
    lines = [line for line in output.splitlines() if line.startswith('{"kvant"')]
    assert len(lines) == 1 and json.loads(lines[0])["recipe"].startswith("kivi:")


def test_unwritable_status_is_one_line(smollm2):
    arguments = ["-m", smollm2, "-p", 8, "-n", 0, "-fa", 1, "-r", 1, "-t", 2]
    _, output = run_host("llama-bench", *arguments, recipe="kivi", KVANT_STATUS="/nonexistent/status.json")
    assert len(kvant_lines(output)) == 1 and "cannot write" in output


def test_keys_beyond_half_precision_fail_cleanly(plugin, tmp_path):
    """A key that the cache cannot hold fails the evaluation with one line; the process goes on."""
    model = tmp_path / "huge.gguf"
    tiny_models.write_llama(model, 1e6)
    done = run_python("failing_scenario.py", plugin, model, recipe="kivi")
    assert done.stdout.split()[-1] == "refused"
    assert len([line for line in kvant_lines(done.stderr) if "computation failed" in line]) == 1


def test_recurrent_model_passes_through(plugin, tmp_path):
    model = tmp_path / "mamba.gguf"
    tiny_models.write_mamba(model)
    status = tmp_path / "status.json"
    done = run_python("recurrent_scenario.py", plugin, model, recipe="kivi", KVANT_STATUS=str(status))
    assert done.stdout.split()[-1] == "equal"
    passed = read_status(status)["passed_through"]
    assert {p["tensor"] for p in passed} == {f"cache_{kind}_l{i}" for kind in "rs" for i in range(2)}
