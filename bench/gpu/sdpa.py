"""torch's scaled_dot_product_attention on an fp16 cache: every back end, graph replay over rotating caches.

One JSON line each. usage: sdpa.py [decode|prefill|all]
"""

import json
import math
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROTATE = 220e6
SHAPES = [(32, 32768), (32, 8192), (8, 32768), (1, 131072), (1, 32768), (1, 8192), (1, 4096)]
# Chunks of a prompt, without a mask: no back end takes the mask of a chunk at the end of its context in every shape,
# and it would save 1 to 3 % of the arithmetic.
CHUNKS = [(1, 32768, 64), (1, 32768, 512), (1, 32768, 2048)]
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
HEADS, GROUP, DIM = 8, 4, 128


def measure(backend: SDPBackend, batch: int, tokens: int, rows: int) -> float:
    """Median microseconds of one call."""
    size = 2 * batch * HEADS * tokens * DIM * 2
    sets = max(1, math.ceil(ROTATE / size))
    caches = [
        [torch.randn(batch, HEADS, tokens, DIM, dtype=torch.float16, device="cuda") for _ in range(2)] for _ in range(sets)
    ]
    q = torch.randn(batch, HEADS * GROUP, rows, DIM, dtype=torch.float16, device="cuda")
    count = max(sets, min(100, math.ceil(2e10 / size))) if rows == 1 else 12

    def calls() -> None:
        for i in range(count):
            keys, values = caches[i % sets]
            F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    with sdpa_kernel(backend), torch.inference_mode():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        times = []
        for _ in range(13):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / count)
    return statistics.median(times[2:])


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else "all"
    shapes = [(*shape, 1) for shape in SHAPES] if what in ("decode", "all") else []
    shapes += CHUNKS if what in ("prefill", "all") else []
    for batch, tokens, rows in shapes:
        for name, backend in BACKENDS.items():
            line = {"batch": batch, "tokens": tokens, "rows": rows, "backend": name, "torch": torch.__version__}
            try:
                line["us"] = round(measure(backend, batch, tokens, rows), 1)
            except RuntimeError as error:  # a back end that does not take the shape
                line["refused"] = str(error).splitlines()[0][:100]
            torch.cuda.empty_cache()
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
