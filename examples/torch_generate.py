"""Generation with a Llama-shaped model of random weights whose attention runs on kvant's packed pages.

Two ways in one run, same weights and prompt: torch's scaled_dot_product_attention on an fp16 cache, and kvant. The
prompt is computed in chunks, each attending to everything before it; then a step is captured in a CUDA graph and
replayed for each new token.

    pip install . --config-settings=cmake.define.KVANT_CUDA=ON
    python examples/torch_generate.py --batch 8 --tokens 32768 --layers 8
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import kvant.cuda as kc

PAGE = 128


@dataclass
class Shape:
    layers: int
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    words: int = 32000


class SdpaCache:
    """fp16 rows [batch, kv_head, token, channel], as torch's attention wants them."""

    def __init__(self, shape: Shape, batch: int, tokens: int):
        self.rows = torch.zeros(2, batch, shape.kv_heads, tokens, shape.dim, dtype=torch.float16, device="cuda")

    def fill(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        self.rows[0].index_copy_(2, positions, keys.transpose(1, 2))
        self.rows[1].index_copy_(2, positions, values.transpose(1, 2))

    def attend(self, q: torch.Tensor, length: int) -> torch.Tensor:
        rows = q.shape[1]
        keys, values = (x[:, :, :length] for x in self.rows)
        mask = causal_lower_right(rows, length) if rows > 1 else None
        # cuDNN's kernel is the fastest for one row, flash attention takes the mask of a chunk.
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        with sdpa_kernel(backends if rows == 1 else backends[1:], set_priority=True):
            out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    def prepare(self, new: int) -> None:
        pass

    def seal(self) -> None:
        pass

    def count_appended(self) -> None:
        pass

    def nbytes(self) -> int:
        return self.rows.nbytes


class KvantCache:
    """One layer's pool with one sequence per row of the batch."""

    def __init__(self, shape: Shape, batch: int, tokens: int, recipe: str, chunk: int):
        # Of a sequence: a chunk before it is sealed, the window, sinks, a started page.
        open_pages = -(-chunk // PAGE) + 4
        self.pool = kc.PagePool(
            recipe,
            kv_heads=shape.kv_heads,
            key_dim=shape.dim,
            value_dim=shape.dim,
            dtype="f16",
            pages=batch * (tokens // PAGE + 1),
            exact_pages=batch * open_pages,
        )
        self.sequences = [kc.Sequence(self.pool) for _ in range(batch)]
        self.batch = kc.Batch(self.pool, batch, tokens + PAGE)
        self.batch.bind(self.sequences, stream())
        self.heads = shape.heads
        self.plans: dict[int, kc.AttendPlan] = {}

    def fill(self, keys: torch.Tensor, values: torch.Tensor, _positions: torch.Tensor) -> None:
        self.batch.append(keys, values, stream())

    def attend(self, q: torch.Tensor, _length: int) -> torch.Tensor:
        rows = q.shape[1]
        if rows not in self.plans:
            self.plans[rows] = kc.AttendPlan(self.batch, self.heads, rows)
        out = torch.empty_like(q)
        self.plans[rows].run(q, out, stream=stream())
        return out

    def prepare(self, new: int) -> None:
        """Room and a plan for that many steps of one token. Pages that fill up meanwhile are sealed afterwards."""
        self.batch.reserve(new, stream())
        self.plans = {1: kc.AttendPlan(self.batch, self.heads, headroom=new)}

    def seal(self) -> None:
        if self.batch.seal_ready(stream()) > 0:
            self.plans.clear()  # pages have changed hands

    def count_appended(self) -> None:
        self.batch.count_appended(1)

    def nbytes(self) -> int:
        return self.pool.nbytes


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


class Model:
    """Llama's layers: RMS norm, grouped-query attention with rotary positions, gated MLP. Random weights."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.kv = shape.kv_heads * shape.dim

        def weight(out: int, inner: int) -> torch.Tensor:
            return torch.randn(out, inner, dtype=torch.float16, device="cuda") * inner**-0.5

        self.embed = weight(shape.words, shape.hidden)
        self.layers = [
            {
                "qkv": weight(shape.hidden + 2 * self.kv, shape.hidden),
                "o": weight(shape.hidden, shape.hidden),
                "up": weight(2 * shape.inner, shape.hidden),
                "down": weight(shape.hidden, shape.inner),
            }
            for _ in range(shape.layers)
        ]
        self.rates = 500000.0 ** (-torch.arange(0, shape.dim, 2, device="cuda") / shape.dim)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].float() * self.rates
        cos, sin = angles.cos()[:, None].half(), angles.sin()[:, None].half()
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, length: int, caches: list) -> torch.Tensor:
        """tokens [batch, row] at positions [row], the last of `length`: the logits of the last row."""
        shape = self.shape
        batch, rows = tokens.shape
        x = self.embed[tokens] * shape.hidden**0.5
        for w, cache in zip(self.layers, caches):
            q, k, v = (F.rms_norm(x, (shape.hidden,)) @ w["qkv"].T).split([shape.hidden, self.kv, self.kv], -1)
            q = self.rotate(q.reshape(batch, rows, shape.heads, shape.dim), positions)
            k = self.rotate(k.reshape(batch, rows, shape.kv_heads, shape.dim), positions)
            cache.fill(k, v.reshape(batch, rows, shape.kv_heads, shape.dim).contiguous(), positions)
            x = x + cache.attend(q, length).reshape(batch, rows, shape.hidden) @ w["o"].T
            gate, up = (F.rms_norm(x, (shape.hidden,)) @ w["up"].T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ w["down"].T
        return F.rms_norm(x[:, -1], (shape.hidden,)) @ self.embed.T


def fill_prompt(model: Model, caches: list, prompt: torch.Tensor, chunk: int) -> torch.Tensor:
    """Computes the prompt; returns the logits of its last token."""
    for start in range(0, prompt.shape[1], chunk):
        tokens = prompt[:, start : start + chunk]
        end = start + tokens.shape[1]
        logits = model.forward(tokens, torch.arange(start, end, device="cuda"), end, caches)
        for cache in caches:
            cache.seal()
    return logits


def generate(model: Model, caches: list, token: torch.Tensor, start: int, new: int) -> float:
    """Seconds for `new` tokens, greedily, behind two steps that set things up.

    torch's side attends to the rows that are still to be written as well (zeros, less than 1 % of them): its fastest
    kernel wants one length in a graph.
    """
    token = token.clone()
    position = torch.tensor([start], device="cuda")
    length = start + new + 2
    for cache in caches:
        cache.prepare(new + 2)

    def step() -> None:
        token.copy_(model.forward(token, position, length, caches).argmax(-1, keepdim=True))
        position.add_(1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # torch's libraries start up outside the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()  # counted as appended, but it runs only when the graph does: first here
    graph.replay()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(new):
        for cache in caches:
            cache.count_appended()
        graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="kitty", help="kvant's recipe (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32768, help="of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens per call")
    args = parser.parse_args()
    torch.manual_seed(1)
    model = Model(Shape(args.layers))
    prompt = torch.randint(model.shape.words, (args.batch, args.tokens), device="cuda")
    print(f"{kc.device_name()}: {args.layers} layers, batch {args.batch}, {args.tokens} tokens, recipe {args.recipe}")

    room = args.tokens + args.new + 2
    logits = {}
    with torch.inference_mode():
        for name in ("torch SDPA, fp16", "kvant"):
            if name == "kvant":
                caches = [KvantCache(model.shape, args.batch, room, args.recipe, args.chunk) for _ in model.layers]
            else:
                caches = [SdpaCache(model.shape, args.batch, room) for _ in model.layers]
            model.forward(prompt[:, :1], torch.zeros(1, dtype=torch.long, device="cuda"), 1, caches[:0])  # start-up
            torch.cuda.synchronize()
            begin = time.perf_counter()
            logits[name] = fill_prompt(model, caches, prompt, args.chunk)
            torch.cuda.synchronize()
            filled = time.perf_counter() - begin
            token = logits[name].argmax(-1, keepdim=True)
            seconds = generate(model, caches, token, args.tokens, args.new)
            size = sum(cache.nbytes() for cache in caches)
            print(
                f"{name:17} prompt {args.batch * args.tokens / filled:8.0f} tokens/s   "
                f"then {args.batch * args.new / seconds:7.1f} tokens/s, {seconds / args.new * 1e3:6.2f} ms a step   "
                f"cache {size / 2**30:6.2f} GiB"
            )
            del caches
            torch.cuda.empty_cache()
    a, b = (x.float() for x in logits.values())
    print(f"cosine of the logits after the prompt: {F.cosine_similarity(a, b, dim=-1).mean():.4f}")


if __name__ == "__main__":
    main()
