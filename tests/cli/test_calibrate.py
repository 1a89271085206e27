"""`kvant calibrate`: what it learns is what numpy learns from the recorded rows; the file is held against the model."""

import struct
import subprocess

import numpy as np
import pytest
from conftest import KVANT
from gguf_file import gguf_bytes, llama
from rows_file import as_weights, read_calibration, read_rows

OK, CHILD, USAGE, BAD_INPUT, IO, UNSUPPORTED = range(6)
SHORT = ("-c", 96, "--chunks", 1)


@pytest.fixture(scope="module", name="learned")
def calibrated(tmp_path_factory, model, text):
    """One short calibration of SmolLM2: (file, recorded rows)."""
    folder = tmp_path_factory.mktemp("calibration")
    file, rows = folder / "smol.kvcal", folder / "smol.rows"
    command = [KVANT, "calibrate", "-m", model, "-f", text, "-o", file, "--rows", rows, *SHORT]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == OK, done.stderr
    assert done.stdout.strip() == str(file)
    return file, rows


def inner_ranges(vectors, outliers):
    """Minimum and maximum of each row of `vectors` without its outliers."""
    ordered = np.sort(vectors, axis=1)
    outside = int(np.ceil(outliers / 2 * vectors.shape[1] - 1e-9))
    return ordered[:, outside], ordered[:, vectors.shape[1] - 1 - outside]


def weighted_error(vectors, weights, outliers, levels):
    """Sum of s^2 * weight * squared distance to the nearest level, of values inside their vector's range."""
    low, high = (end[:, None].astype(np.float64) for end in inner_ranges(vectors, outliers))
    half = (high - low) / 2
    inside = (vectors >= low) & (vectors <= high) & (half > 0)
    x = (vectors - (low + high) / 2) / np.where(half > 0, half, 1)
    nearest = np.abs(x[..., None] - levels).min(-1)
    return float((half**2 * weights * nearest**2)[inside].sum()), x[inside], (half**2 * weights)[inside]


def plain_k_means(x, weights, count):
    centers = np.quantile(x, (np.arange(count) + 0.5) / count)
    for _ in range(200):
        nearest = np.abs(x[:, None] - centers).argmin(1)
        mass = np.bincount(nearest, weights, count)
        centers = np.where(mass > 0, np.bincount(nearest, weights * x, count) / np.maximum(mass, 1e-300), centers)
    return centers


def check_layer(layer, rows, weight):
    keys, values = rows[layer["layer"], 0], rows[layer["layer"], 1]
    for side, vectors in ((0, keys.T), (1, values)):
        if side == 0:
            assert np.array_equal(layer["ranges"], np.stack(inner_ranges(vectors, 0.01)))
        weights = weight(vectors)
        for bits in (2, 3):
            levels = layer["tables"][side, bits - 2, 0, : 1 << bits] / 127.0 - 1
            assert (np.diff(levels) > 0).all()
            error, x, w = weighted_error(vectors, weights, 0.01, levels)
            plain, _, _ = weighted_error(vectors, weights, 0.01, plain_k_means(x, w, 1 << bits))
            assert error < 1.02 * plain


def test_ranges_and_levels_are_those_of_numpy(learned):
    file, rows = learned
    calibration = read_calibration(file)
    assert calibration["texts"][1:] == ["llama", "eval.txt"]
    assert (calibration["tokens"], calibration["weighted"], calibration["outliers"]) == (95, 0, 0.01)
    assert [layer["layer"] for layer in calibration["layers"]] == list(range(30))
    recorded = read_rows(rows)
    assert recorded[0, 0].shape == (95, 192)
    for layer in calibration["layers"][::13]:
        assert layer["shape"] == (3, 64, 64)
        check_layer(layer, recorded, lambda vectors: np.ones_like(vectors, np.float64))


def test_fisher_weights_count(learned, kvant, model, text, tmp_path):
    _, rows = learned
    weights, file = tmp_path / "weights", tmp_path / "weighted.kvcal"

    def loud(values):
        return np.where(values > 0, 1.0, 1e-4).astype(np.float32)

    weights.write_bytes(as_weights(rows, loud))
    done = kvant("calibrate", "-m", model, "-f", text, "-o", file, "--fisher", weights, *SHORT)
    assert done.returncode == OK, done.stderr
    calibration = read_calibration(file)
    assert calibration["weighted"] == 1
    check_layer(calibration["layers"][4], read_rows(rows), loud)
    weights.write_bytes(as_weights(rows, lambda values: -loud(values)))
    done = kvant("calibrate", "-m", model, "-f", text, "-o", file, "--fisher", weights, *SHORT)
    assert done.returncode == USAGE and "weights of the keys" in done.stderr


def test_keys_before_rope_have_a_file_of_their_own(learned, kvant, model, text, tmp_path):
    after, after_rows = learned
    before, rows = tmp_path / "before.kvcal", tmp_path / "rows"
    done = kvant("calibrate", "-m", model, "-f", text, "-o", before, "--rope", "before", "--rows", rows, *SHORT)
    assert done.returncode == OK, done.stderr
    assert (read_calibration(after)["version"], read_calibration(before)["version"]) == (1, 2)
    recorded, turned = read_rows(rows), read_rows(after_rows)
    check_layer(read_calibration(before)["layers"][4], recorded, lambda vectors: np.ones_like(vectors, np.float64))
    lengths = [np.linalg.norm(all_rows[4, 0], axis=1) for all_rows in (recorded, turned)]
    assert np.allclose(*lengths, rtol=2e-3) and not np.allclose(recorded[4, 0], turned[4, 0], atol=0.1)
    recipe = f"kvquant:k=3,v=3,rope=before,window=0,page=32,file={before}"
    done = kvant("compare", "-m", model, "-f", text, "--recipes", recipe, "-c", 128, "--ubatch", 32, "--chunks", 2,
                 "--no-speed")  # fmt: skip
    assert done.returncode == OK, done.stderr
    assert "keys are stored before RoPE" in done.stdout and "kvquant is calibrated on 95 tokens" in done.stdout
    for file, rope, other in ((after, "before", "after"), (before, "after", "before")):
        done = kvant("run", "--recipe", f"kvquant:rope={rope},file={file}", "--", "llama-bench")
        assert done.returncode == USAGE
        assert all(part in done.stderr for part in ("'rope'", f"'{rope}'", other, str(file))), done.stderr


def test_compare_says_what_the_levels_are(learned, kvant, model, text):
    file, _ = learned
    rows = f"kvquant:k=2,v=2,window=0,page=32; kvquant:k=2,v=2,window=0,page=32,file={file}"
    done = kvant("compare", "-m", model, "-f", text, "--recipes", rows, "-c", 128, "--ubatch", 32, "--chunks", 2,
                 "--no-speed")  # fmt: skip
    assert done.returncode == OK, done.stderr
    assert "remark: kvquant is not calibrated" in done.stdout
    assert "remark: kvquant is calibrated on 95 tokens of 'eval.txt'" in done.stdout
    assert "fewer than 2048 tokens may make the model worse than none" in done.stdout


def test_a_file_of_another_model_is_refused(learned, kvant, text, tmp_path):
    file, _ = learned
    name = read_calibration(file)["texts"][0]
    recipe = f"kvquant:file={file}"
    other = tmp_path / "other.gguf"
    for metadata, parts in (
        (llama(general__name="other"), ["'other'", name, str(file)]),
        (llama(general__name=name), ["3 KV heads of 64", "2 KV heads of 64"]),
    ):
        other.write_bytes(gguf_bytes(metadata))
        for command in (
            ("compare", "-m", other, "-f", text, "--recipes", recipe),
            ("tune", "-m", other, "-f", text, "--bits", 4, "--ladder", recipe),
            ("run", "--recipe", recipe, "--", "llama-bench", "-m", other),
        ):
            done = kvant(*command)
            assert done.returncode == BAD_INPUT, done.stderr
            assert all(part in done.stderr for part in parts), done.stderr


def test_bad_files_and_paths_are_named(kvant, model, text, tmp_path):
    bad = tmp_path / "bad"
    bad.write_bytes(b"KVANTROW" + struct.pack("<II", 2, 1))
    arguments = ("calibrate", "-m", model, "-f", text, *SHORT)
    done = kvant(*arguments, "-o", tmp_path / "x", "--fisher", bad)
    assert done.returncode == BAD_INPUT and "version 2" in done.stderr
    done = kvant(*arguments, "-o", tmp_path / "no/where")
    assert done.returncode == IO and "no/where" in done.stderr
    short = tmp_path / "short.txt"
    short.write_text("The sea is blue.")
    done = kvant("calibrate", "-m", model, "-f", short, "-o", tmp_path / "x")
    assert done.returncode == BAD_INPUT and "too short" in done.stderr
    done = kvant("run", "--recipe", f"kvquant:file={bad}", "--", "llama-bench")
    assert done.returncode == USAGE and str(bad) in done.stderr


def test_an_evaluation_that_failed_midway_is_no_calibration(learned, kvant, model, text, tmp_path):
    """llama-perplexity ends with 0 then, and what it recorded up to there must not pass for all of it."""
    _, rows = learned
    tools, file = tmp_path / "tools", tmp_path / "short.kvcal"
    tools.mkdir()
    program = tools / "llama-perplexity"
    program.write_text(f"#!/bin/sh\ncp '{rows}' \"$KVANT_RECORD\"\necho 'failed to decode' >&2\n")
    program.chmod(0o755)
    done = kvant("calibrate", "-m", model, "-f", text, "-o", file, "--tools", tools, "-c", 96, "--chunks", 2)
    assert done.returncode == CHILD and "failed to decode" in done.stderr
    assert not file.exists()


def test_what_cannot_be_written_is_said_before_anything_runs(kvant, model, text, tmp_path):
    for output in (tmp_path, tmp_path / "nowhere" / "file"):
        done = kvant("calibrate", "-m", model, "-f", text, "-o", output, *SHORT)
        assert done.returncode == IO and str(output) in done.stderr and "recording" not in done.stderr
