"""`kvant tune`: the chosen recipe fits the budget, is one of those measured, and is what the file holds."""

import re

OK, CHILD, USAGE, BAD_INPUT, IO, UNSUPPORTED = range(6)
# Small pages without a window, so that 128 tokens have sealed pages.
COMMON = "page=32,window=0,sink=1"
# So far apart that two chunks tell them apart on every instruction set: 4 and 8 bits do not differ by more than noise.
LADDER = f"kivi:k=2,v=2,{COMMON}; kivi:k=8,v=8,{COMMON}"


def test_the_written_recipe_is_the_best_measured(kvant, model, text, tmp_path):
    recipe = tmp_path / "recipe.txt"
    done = kvant("tune", "-m", model, "-f", text, "--bits", 5.5, "--ladder", LADDER, "-c", 128, "--ubatch", 32,
                 "--chunks", 2, "--group", 8, "-o", recipe)  # fmt: skip
    assert done.returncode == OK, done.stderr
    assert recipe.read_text() == done.stdout
    rows = [line.split() for line in done.stderr.splitlines() if re.match(r"(kivi|layers)\S* +\d\.\d+ +\d\.\d+$", line)]
    assert len(rows) == 2 and all(float(bits) <= 5.5 for _, bits, _ in rows)
    best = min(rows, key=lambda row: float(row[2]))
    assert best[0] == done.stdout.strip()
    # Uniform 2 bits leave half of the budget over: some layers have more.
    assert rows[0][0].startswith("kivi:k=2,v=2") and rows[1][0].startswith("layers=")
    assert float(rows[1][2]) < 0.8 * float(rows[0][2])


def test_what_cannot_be_is_said_before_anything_runs(kvant, model, text):
    arguments = ("tune", "-m", model, "-f", text, "--ladder", LADDER)
    done = kvant(*arguments, "--bits", 2)
    assert done.returncode == USAGE and "--bits is 2" in done.stderr and "needs" in done.stderr
    assert kvant(*arguments).returncode == USAGE
    assert kvant(*arguments, "--bits", 20).returncode == USAGE
    assert kvant("tune", "-m", model, "-f", text, "--bits", 4, "--ladder", "layers=0:f16,*:kivi").returncode == USAGE
    assert kvant("tune", "-m", text, "-f", text, "--bits", 4, "--ladder", LADDER).returncode == BAD_INPUT
    done = kvant(*arguments, "--bits", 4, "-o", "/nowhere/recipe")
    assert done.returncode == IO and "/nowhere/recipe" in done.stderr and "llama-perplexity" not in done.stderr
    done = kvant("tune", "-m", model, "-f", text, "--bits", 5, "--ladder", "stock:q4_0; kivi:k=2,v=2")
    assert done.returncode == USAGE and "stock:q4_0" in done.stderr
