"""A few seconds of libFuzzer on everything that the command reads from outside. Longer: KVANT_FUZZ_SECONDS=600."""

import os
import subprocess

import pytest
from conftest import ROOT
from gguf_file import gguf_bytes, llama
from rows_file import recorded_rows

SECONDS = os.environ.get("KVANT_FUZZ_SECONDS", "5")
SOURCES = {
    "gguf": ["cli/gguf.cpp", "cli/model.cpp"],
    "rows": ["cli/recorded.cpp"],
    "recipe": [
        "cli/recipes.cpp",
        "src/base/base.cpp",
        "src/methods/list.cpp",
        "src/methods/layer_recipes.cpp",
        "src/methods/recipe.cpp",
        "src/methods/f16/f16.cpp",
        "src/methods/kitty/kitty.cpp",
        "src/methods/kivi/kivi.cpp",
        "src/methods/kvquant/calibrated.cpp",
        "src/methods/kvquant/calibration_file.cpp",
        "src/methods/kvquant/kvquant.cpp",
        "src/methods/waterfill/allocate.cpp",
        "src/methods/waterfill/waterfill.cpp",
        "src/methods/zipcache/zipcache.cpp",
    ],
}
SEEDS = {
    "gguf": [gguf_bytes(llama()), gguf_bytes(llama(llama__attention__head_count_kv=[1, 2, 3, 4]))],
    "rows": [recorded_rows([(0, 0, 1, 2), (0, 1, 1, 2)], 3), recorded_rows([(3, 0, 2, 1)], 2, halves=False)],
    "recipe": [b"f16,kivi:k=4,v=4;stock:q8_0/q4_0", b"kitty:boost=0.25,v=2,sink=32,window=128",
               b"layers=0-1:small,*:k=kitty,v=kivi:4"],
}


@pytest.mark.parametrize("target", sorted(SOURCES))
def test_fuzz(target, tmp_path):
    sources = [ROOT / f"tests/cli/fuzz_{target}.cpp"]
    for pattern in SOURCES[target]:
        sources += sorted(ROOT.glob(pattern))
    program = tmp_path / "fuzz"
    build = ["clang++", "-std=c++20", "-O1", "-gline-tables-only", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all",
             f"-I{ROOT}", f"-I{ROOT}/include", f"-I{ROOT}/src", *map(str, sources), "-lfmt", "-lxxhash", "-o", str(program)]  # fmt: skip
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i, seed in enumerate(SEEDS[target]):
        (corpus / f"seed{i}").write_bytes(seed)
    limits = [f"-max_total_time={SECONDS}", "-rss_limit_mb=1024", "-malloc_limit_mb=256", "-timeout=5"]
    done = subprocess.run([program, *limits, corpus], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
