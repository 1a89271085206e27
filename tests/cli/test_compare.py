"""`kvant compare`: the table, its JSON form, and what it says when a step fails."""

import json
import math
import os
import stat

import pytest

OK, CHILD, USAGE, BAD_INPUT, IO, UNSUPPORTED = range(6)
TINY = ("-c", 512, "--chunks", 1, "--threads", 2)  # has sealed pages behind the window of 128 tokens
SHORT = ("-c", 256, "--chunks", 1, "--threads", 2)  # where only the form is looked at
FIELDS = {"recipe", "bits", "bits_asymptotic", "kv_bytes", "rss_bytes", "ppl", "kld", "kld_p99", "same_top",
          "decode_tps", "prefill_tps"}  # fmt: skip


def test_json_schema_and_sense(kvant, model, text):
    done = kvant("compare", "-m", model, "-f", text, *TINY, "--recipes", "f16,kivi:k=4,v=4,stock:q8_0", "--depths",
                 "0,128", "--repeat", 1, "--json")  # fmt: skip
    assert done.returncode == OK, done.stderr
    rows = json.loads(done.stdout)
    assert [row["recipe"] for row in rows] == ["stock:f16", "f16", "kivi:k=4,v=4", "stock:q8_0"]
    for row in rows:
        assert FIELDS <= row.keys()
        assert set(row["decode_tps"]) == set(row["prefill_tps"]) == {"0", "128"}
        numbers = [row[name] for name in FIELDS - {"recipe", "decode_tps", "prefill_tps"}]
        numbers += [*row["decode_tps"].values(), *row["prefill_tps"].values()]
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert row["rss_bytes"] > 50e6
    base, f16, kivi, q8 = rows
    assert (base["kld"], base["same_top"], base["bits"]) == (0, 100, 16)
    assert q8["bits"] == 8.5 and q8["kv_bytes"] * 16 == base["kv_bytes"] * 8.5
    assert f16["kld"] < 0.001 and kivi["kld"] < 0.1
    assert kivi["kv_bytes"] < 0.6 * base["kv_bytes"] and kivi["bits"] > kivi["bits_asymptotic"]
    assert base["kv_bytes_source"] == "computed" and kivi["kv_bytes_source"] == "plug-in"
    # Progress is on stderr, data alone on stdout.
    assert "[1/8]" in done.stderr and "[8/8]" in done.stderr


def test_table_and_markdown_without_speed(kvant, model, text):
    arguments = ("compare", "-m", model, "-f", text, *SHORT, "--no-speed", "--recipes", "stock:q8_0/q4_0")
    table = kvant(*arguments)
    assert table.returncode == OK, table.stderr
    lines = table.stdout.splitlines()
    assert lines[0].split()[0] == "recipe" and lines[1].startswith("stock:f16 ")
    assert lines[2].startswith("stock:q8_0/q4_0") and " 6.50 " in lines[2]
    assert os.path.realpath(text).split("/")[-1] in table.stdout
    markdown = kvant(*arguments, "--markdown").stdout.splitlines()
    assert markdown[0].startswith("| recipe | bits |") and set(markdown[1]) <= set("|-:")
    assert markdown[0].count("|") == markdown[2].count("|") == markdown[3].count("|")


def test_temporary_files_are_removed(kvant, model, text, tmp_path):
    done = kvant("compare", "-m", model, "-f", text, *SHORT, "--no-speed", "--recipes", "stock:q8_0",
                 env={"TMPDIR": str(tmp_path)})  # fmt: skip
    assert done.returncode == OK, done.stderr
    assert not list(tmp_path.iterdir())


def test_too_short_text(kvant, model, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("a few words only")
    done = kvant("compare", "-m", model, "-f", short, "--recipes", "stock:q8_0", "--no-speed")
    assert done.returncode == BAD_INPUT
    assert "too short" in done.stderr and not done.stdout


def test_missing_inputs(kvant, model, text, tmp_path):
    assert kvant("compare", "-m", tmp_path / "no.gguf", "-f", text).returncode == IO
    assert kvant("compare", "-m", model, "-f", tmp_path / "no.txt").returncode == IO
    assert kvant("compare", "-m", model, "-f", tmp_path).returncode == BAD_INPUT
    assert kvant("compare", "-m", text, "-f", text).returncode == BAD_INPUT
    assert kvant("compare", "-m", model, "-f", text, "--json", "--markdown").returncode == USAGE


def test_too_few_positions_are_said_before_anything_runs(kvant, model, text):
    done = kvant("compare", "-m", model, "-f", text, "--recipes", "stock:q8_0", "-c", 128, "--chunks", 1)
    assert done.returncode == USAGE
    assert "64 positions" in done.stderr and "100" in done.stderr


def test_no_space_is_said_before_anything_runs(kvant, model, text):
    done = kvant("compare", "-m", model, "-f", text, "--recipes", "stock:q8_0", "-c", 1 << 20, "--chunks", 1 << 20)
    assert done.returncode == IO
    assert "TMPDIR" in done.stderr


@pytest.fixture(name="broken_host")
def fake_host(tmp_path):
    program = tmp_path / "llama-perplexity"
    program.write_text("#!/bin/sh\necho 'the model is cursed' >&2\nexit 3\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def test_failing_child(kvant, model, text, broken_host):
    done = kvant("compare", "-m", model, "-f", text, "--recipes", "stock:q8_0", "--tools", broken_host)
    assert done.returncode == CHILD
    assert "cursed" in done.stderr and "exit code 3" in done.stderr


def test_host_that_ignores_the_plugin(kvant, model, text, broken_host):
    """Figures of a run without the plug-in must never stand in a row of kvant."""
    (broken_host / "llama-perplexity").write_text("#!/bin/sh\necho 'Final estimate: PPL = 10.0 +/- 1'\n")
    done = kvant("compare", "-m", model, "-f", text, "--recipes", "kivi", "--tools", broken_host,
                 "--plugin", text)  # fmt: skip
    assert done.returncode == UNSUPPORTED
    assert "did not use it" in done.stderr


@pytest.mark.parametrize("layers", [0, 10])
def test_layers_that_the_host_kept_are_an_error(kvant, model, text, layers):
    done = kvant("compare", "-m", model, "-f", text, *SHORT, "--no-speed", "--recipes", "kivi",
                 env={"LLAMA_ARG_N_GPU_LAYERS": str(layers)})  # fmt: skip
    assert done.returncode == UNSUPPORTED and not done.stdout
    assert f"{max(0, layers - 1)} of the model's 30 layers" in done.stderr
