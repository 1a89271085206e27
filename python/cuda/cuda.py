"""The cache on NVIDIA GPUs, on tensors of torch or of any framework with DLPack. Only in builds with KVANT_CUDA=ON.

Tensors are contiguous, on the pool's device and of its type; they are read and written where they lie. ``stream`` is an
integer, for example ``torch.cuda.current_stream().cuda_stream``; 0 is the default stream. Arguments that do not fit are
``kvant.Error`` (a ``ValueError``), objects without DLPack a ``TypeError``.

    pool = PagePool("kitty", kv_heads=8, key_dim=128, value_dim=128, dtype="f16", pages=2048, exact_pages=64)
    sequences = [Sequence(pool) for _ in range(8)]
    batch = Batch(pool, max_sequences=8, max_tokens=32768)
    batch.bind(sequences)
    batch.append(keys, values)          # [8, rows, 8, 128]
    batch.seal_ready()
    plan = AttendPlan(batch, query_heads=32, rows=rows)
    plan.run(queries, out)              # [8, rows, 32, 128]
"""

from ._core import cuda as _cuda

AttendPlan = _cuda.AttendPlan
Batch = _cuda.Batch
PagePool = _cuda.PagePool
Sequence = _cuda.Sequence
device_name = _cuda.device_name
is_available = _cuda.is_available
page_bytes = _cuda.page_bytes

__all__ = ["AttendPlan", "Batch", "PagePool", "Sequence", "device_name", "is_available", "page_bytes"]
