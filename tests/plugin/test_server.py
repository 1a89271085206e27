"""llama-server: two slots at once, a prompt that is cached already, slots saved to files and restored."""

import concurrent.futures

import pytest
from conftest import kvant_lines, read_status
from server import running

COUNT = "Count: " + ", ".join(str(i) for i in range(1, 90)) + ","
ALPHABET = ("alpha beta gamma delta epsilon. " * 40).strip()
TOLERANCE = 0.1  # of a log-probability; stock bf16 against stock f16 stays below it on these prompts


def exercise(server):
    """Answers of every kind, in an order in which each depends on the state that the ones before it left."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        one = pool.submit(server.complete, COUNT, 0)
        two = pool.submit(server.complete, ALPHABET, 1)
        answers = {"one": one.result()[0], "two": two.result()[0]}
    answers["longer"], answers["longer_cached"] = server.complete(COUNT + " 90, 91,", 0)
    saved = server.slot(0, "save", "slot.bin")
    server.slot(0, "erase")
    restored = server.slot(0, "restore", "slot.bin")
    answers["saved"] = saved["n_saved"] == restored["n_restored"] > 0
    answers["after_restore"], answers["restored_cached"] = server.complete(COUNT + " 90, 91,", 0)
    return answers


def run(model, folder, layout, recipe=None):
    folder.mkdir()
    arguments = ["-c", 2048, "-np", 2, "-fa", "on", "--slot-save-path", folder, "-fit", "off", *layout]
    status = {"KVANT_STATUS": str(folder / "status.json")} if recipe else {}
    with running(model, folder / "log", *arguments, recipe=recipe, **status) as server:
        return exercise(server)


@pytest.mark.parametrize("layout", [["-kvu"], ["-no-kvu"]], ids=["unified", "streams"])
@pytest.mark.parametrize("recipe", ["f16", "kivi:k=4,v=4"])
def test_answers_equal_those_of_the_stock_server(layout, recipe, plugin, smollm2, tmp_path):
    assert plugin.exists()
    stock = run(smollm2, tmp_path / "stock", layout)
    ours = run(smollm2, tmp_path / "ours", layout, recipe)
    tolerance = TOLERANCE if recipe == "f16" else 3 * TOLERANCE
    for name in ("one", "two", "longer", "after_restore"):
        assert [t for t, _ in ours[name]] == [t for t, _ in stock[name]], name
        assert max(abs(a - b) for (_, a), (_, b) in zip(ours[name], stock[name], strict=True)) < tolerance, name
    assert ours["saved"]
    assert ours["longer_cached"] == stock["longer_cached"] > 200
    assert ours["restored_cached"] == stock["restored_cached"] > 200
    status = read_status(tmp_path / "ours/status.json")
    assert status["cells_written"] > 0 and not status["passed_through"]
    if recipe != "f16":
        assert sum(layer["sealed_pages"] for layer in status["layers"]) > 0


def test_offload_off_says_so(plugin, smollm2, tmp_path):
    """With -nkvo the host keeps the cache for itself; one line tells, and the answers are the host's own."""
    assert plugin.exists()
    log = tmp_path / "log"
    with running(smollm2, log, "-c", 512, "-np", 1, "-nkvo", "-fit", "off", recipe="kivi") as server:
        chosen, _ = server.complete("Count: 1, 2, 3, 4, 5, 6,", 0, count=4)
    assert "".join(t for t, _ in chosen).startswith(" 7")
    lines = kvant_lines(log.read_text(errors="replace"))
    assert len(lines) == 1 and "nothing is compressed" in lines[0]


def test_bad_recipe_stops_the_server(plugin, smollm2, tmp_path):
    assert plugin.exists()
    log = tmp_path / "log"
    with pytest.raises(AssertionError, match="ended early"), running(smollm2, log, "-c", 512, recipe="kivi:k=99"):
        pass
    lines = kvant_lines(log.read_text(errors="replace"))
    assert len(lines) == 1 and "KVANT_RECIPE" in lines[0] and "'kivi:k=99'" in lines[0]
