"""kvant.cuda on torch tensors, against torch's arithmetic in double precision.

Not run without a CUDA build, torch and a GPU.
"""

import pytest

kc = pytest.importorskip("kvant.cuda", reason="this build of kvant has no CUDA library")
torch = pytest.importorskip("torch")
if not (kc.is_available() and torch.cuda.is_available()):
    pytest.skip("no CUDA device", allow_module_level=True)

import kvant

HEADS, GROUP, DIM = 2, 4, 128


def make_pool(recipe="kivi:k=4,v=4", **changes):
    options = dict(kv_heads=HEADS, key_dim=DIM, value_dim=DIM, dtype="f16", pages=16, exact_pages=16)
    return kc.PagePool(recipe, **(options | changes))


def rows(batch, count, heads, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(batch, count, heads, DIM, dtype=torch.float16, device="cuda", generator=generator)


def attend(q, keys, values):
    """[batch, row, head, channel], the last rows of each sequence, by definition."""
    q, keys, values = (x.double() for x in (q, keys, values))
    keys, values = (x.repeat_interleave(GROUP, 2) for x in (keys, values))
    scores = torch.einsum("brhd,bthd->bhrt", q, keys) * DIM**-0.5
    count, length = scores.shape[-2:]
    seen = torch.ones(count, length, dtype=torch.bool, device="cuda").tril(length - count)
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhrt,bthd->brhd", scores.softmax(-1), values), scores.logsumexp(-1).transpose(1, 2)


def relative(a, b):
    return float((a.double() - b).norm() / b.norm())


def filled(batch=2, count=100, pool=None):
    pool = pool or make_pool()
    sequences = [kc.Sequence(pool) for _ in range(batch)]
    keys, values = rows(batch, count, HEADS, 1), rows(batch, count, HEADS, 2)
    calls = kc.Batch(pool, batch, 1024)
    calls.bind(sequences)
    calls.append(keys, values, torch.cuda.current_stream().cuda_stream)
    return sequences, calls, keys, values


def test_values_that_no_cache_stores_are_counted():
    pool = make_pool()
    filled(pool=pool)
    assert pool.invalid_values() == 0
    calls = kc.Batch(pool, 1, 1024)
    sequence = kc.Sequence(pool)
    calls.bind([sequence])
    keys, values = rows(1, 3, HEADS, 1), rows(1, 3, HEADS, 2)
    keys[0, 1, 0, 5:7] = float("nan")
    values[0, 2, 1, 0] = -float("inf")
    stream = torch.cuda.current_stream().cuda_stream
    calls.append(keys, values, stream)
    assert pool.invalid_values(stream) == 3


@pytest.mark.parametrize("count", [1, 8, 9, 40])
def test_exact_rows(count):
    sequences, calls, keys, values = filled()
    assert [s.length for s in sequences] == [100, 100]
    q = rows(2, count, HEADS * GROUP, 3)
    out = torch.empty_like(q)
    lse = torch.empty(2, count, HEADS * GROUP, device="cuda")
    plan = kc.AttendPlan(calls, HEADS * GROUP, count)
    assert plan.path == ("integer" if count <= 8 else "prefill")
    plan.run(q, out, lse, torch.cuda.current_stream().cuda_stream)
    want, want_lse = attend(q, keys, values)
    assert relative(out, want) < 1e-3
    assert float((lse - want_lse).abs().max()) < 1e-2


@pytest.mark.parametrize(
    "recipe, blind", [("kivi:k=4,v=4", 0), ("kvquant:k=4,v=4,sink=0", 0), ("zipcache:low=4,high=5,vlow=4,vhigh=5", 3)]
)
def test_sealed_pages_on_a_stream_of_their_own(recipe, blind):
    """4 bits of normal rows: attention stays within what that rounding costs."""
    stream = torch.cuda.Stream()
    pool = make_pool(recipe)
    sequences = [kc.Sequence(pool)]
    keys, values, q = rows(1, 600, HEADS, 1), rows(1, 600, HEADS, 2), rows(1, 20, HEADS * GROUP, 3)
    out = {path: torch.empty_like(q) for path in ("prefill", "reference")}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        calls = kc.Batch(pool, 1, 1024)
        calls.bind(sequences, stream.cuda_stream)
        calls.append(keys, values, stream=stream.cuda_stream)
        assert calls.seal_ready(stream.cuda_stream) == 3
        for path, target in out.items():
            kc.AttendPlan(calls, HEADS * GROUP, 20, path=path).run(q, target, stream=stream.cuda_stream)
    stream.synchronize()
    assert sequences[0].sealed_pages == 3
    assert sequences[0].blind_seals == blind
    assert relative(out["prefill"], out["reference"].double()) < 1e-3
    assert relative(out["prefill"], attend(q, keys, values)[0]) < 0.2
    assert pool.free_pages == 13


def test_keys_before_rope():
    pool = make_pool("kvquant:k=4,v=4,sink=0,rope=before")
    assert pool.needs_rotation and not make_pool().needs_rotation
    sequences = [kc.Sequence(pool)]
    keys, values, q = rows(1, 600, HEADS, 1), rows(1, 600, HEADS, 2), rows(1, 3, HEADS * GROUP, 3)
    calls = kc.Batch(pool, 1, 1024)
    calls.bind(sequences)
    with pytest.raises(kvant.Error, match="set_key_rotation"):
        calls.append(keys, values)
    frequencies = [10000 ** (-2 * i / DIM) for i in range(DIM // 2)]
    with pytest.raises(ValueError, match="65 pairs"):
        pool.set_key_rotation(frequencies + [1.0])
    with pytest.raises(ValueError, match="pairs"):
        pool.set_key_rotation(frequencies, pairs="quarters")
    pool.set_key_rotation(frequencies)
    calls.append(keys, values)
    assert calls.seal_ready() == 3
    with pytest.raises(ValueError, match="rotation"):
        pool.set_key_rotation(frequencies, pairs="adjacent")
    out = {path: torch.empty_like(q) for path in ("automatic", "prefill", "reference")}
    for path, target in out.items():
        plan = kc.AttendPlan(calls, HEADS * GROUP, 3, path=path)
        assert plan.path == ("integer" if path == "automatic" else path)
        plan.run(q, target)
    torch.cuda.synchronize()
    for path in ("automatic", "prefill"):
        assert relative(out[path], out["reference"].double()) < 1e-3
    assert relative(out["automatic"], attend(q, keys, values)[0]) < 0.2


def test_objects_keep_alive_what_they_need():
    pool = make_pool()
    sequences, calls, keys, values = filled(pool=pool)
    plan = kc.AttendPlan(calls, HEADS * GROUP)
    fork = sequences[0].fork()
    assert fork.length == 100 and pool.free_exact_pages == 13
    del sequences, calls
    q = rows(2, 1, HEADS * GROUP, 3)
    out = torch.empty_like(q)
    plan.run(q, out)
    torch.cuda.synchronize()
    assert relative(out, attend(q, keys, values)[0]) < 1e-3
    del plan, fork
    assert pool.free_exact_pages == 16


def test_refusals():
    sequences, calls, keys, values = filled(pool=make_pool(exact_pages=4))
    plan = kc.AttendPlan(calls, HEADS * GROUP, 2)
    q = rows(2, 2, HEADS * GROUP, 3)
    out = torch.empty_like(q)
    for bad, word in [
        (q.float(), "f32"),
        (q.bfloat16(), "bf16"),
        (q.cpu(), "device"),
        (q[:1], "shape"),
        (q.transpose(1, 2).contiguous().transpose(1, 2), "contiguous"),
    ]:
        with pytest.raises(ValueError, match=word):
            plan.run(bad, out)
        with pytest.raises(ValueError, match="out"):
            plan.run(q, bad)
    with pytest.raises(TypeError):
        plan.run([1.0], out)
    with pytest.raises(TypeError):
        calls.append([1.0], [1.0])
    with pytest.raises(ValueError, match="4"):
        calls.append(keys[0], values[0])
    with pytest.raises(kvant.Error, match="exact pages"):
        calls.append(rows(2, 900, HEADS, 1), rows(2, 900, HEADS, 2))
    with pytest.raises(ValueError, match="7"):
        kc.AttendPlan(calls, 7)
    with pytest.raises(ValueError, match="path"):
        kc.AttendPlan(calls, HEADS * GROUP, path="fast")
    with pytest.raises(ValueError, match="dtype"):
        make_pool(dtype="f32")
    with pytest.raises(ValueError, match="80"):
        make_pool(key_dim=80)
    assert [s.length for s in sequences] == [100, 100]
