"""What is done to a cache, as functions of one context. Each returns the logits that must agree between hosts.

Run as a program it does each scenario twice, with the cache on the CPU and with the cache in the plug-in, and prints a
JSON object with the divergence per scenario; with --floor also the divergence of the host's own bf16 cache, which is
what a change of arithmetic alone makes on this model and text. One process per recipe: the plug-in reads it once.
"""

import json
import sys

import numpy as np
from capi import ON_DEVICE, Context, Model, divergence, load_plugin

BF16 = 30  # the host's number of the type


def plain(model, tokens, **options):
    """A prompt in three batches, then tokens one by one."""
    c = Context(model, **options)
    c.fill(tokens[:100], 0)
    c.fill(tokens[100:290], 100)
    out = [c.extend(tokens[290:380], 290)]
    out += [c.extend(tokens[i : i + 1], i) for i in range(380, 400)]
    c.close()
    return np.concatenate(out)


def quantized_type(model, tokens, **options):
    """The host believes that its cache is q8_0, so state and rotation go through that type."""
    return plain(model, tokens, cache_type=8, **options)


def bf16_type(model, tokens, **options):
    return plain(model, tokens, cache_type=BF16, **options)


def no_flash(model, tokens, **options):
    return plain(model, tokens, flash=0, **options)


def two_sequences(model, tokens, **options):
    """Two sequences whose tokens alternate in one batch."""
    c = Context(model, n_ctx=1024, n_seq=2, **options)
    a, b = tokens[:200], tokens[200:400]
    c.fill(a[:150], 0, 0)
    c.fill(b[:170], 0, 1)
    out = []
    for i in range(30):
        out.append(c.decode([a[150 + i], b[170 + i]], [150 + i, 170 + i], [0, 1]))
    c.close()
    return np.concatenate(out)


def copied_sequence(model, tokens, **options):
    """A prefix that is copied to a second sequence, then both go on differently."""
    c = Context(model, n_ctx=1024, n_seq=2, **options)
    c.fill(tokens[:300], 0, 0)
    c.copy(0, 1)
    out = [c.extend(tokens[300:340], 300, 0), c.extend(tokens[340:380], 300, 1)]
    out.append(c.decode([tokens[380], tokens[381]], [340, 340], [0, 1]))
    c.close()
    return np.concatenate(out)


def removed_and_refilled(model, tokens, **options):
    """Cells that are freed in the middle and at the end, and used again in another order."""
    c = Context(model, **options)
    c.fill(tokens[:360], 0)
    c.remove(0, 300, -1)
    c.fill(tokens[310:400], 300)
    c.remove(0, 150, 170)
    c.remove(0, 380, -1)
    out = [c.extend(tokens[200:260], 380)]
    c.close()
    return np.concatenate(out)


def shifted(model, tokens, **options):
    """Context shift: the middle goes, the rest moves forward, three times."""
    c = Context(model, **options)
    c.fill(tokens[:400], 0)
    out, n = [], 400
    for _ in range(3):
        c.remove(0, 4, 64)
        c.shift(0, 64, n, -60)
        n -= 60
        out.append(c.extend(tokens[100:140], n))
        n += 40
    c.close()
    return np.concatenate(out)


def shifted_quantized(model, tokens, **options):
    return shifted(model, tokens, cache_type=8, **options)


def restored(model, tokens, **options):
    """A sequence that is saved, dropped, and restored elsewhere."""
    c = Context(model, n_ctx=1024, n_seq=2, **options)
    c.fill(tokens[:350], 0, 0)
    state = c.save(0)
    c.remove(0, -1, -1)
    c.fill(tokens[50:130], 0, 0)
    c.restore(state, 1)
    out = [c.extend(tokens[350:390], 350, 1), c.extend(tokens[130:160], 80, 0)]
    c.close()
    return np.concatenate(out)


def checkpoint(model, tokens, **options):
    """A checkpoint that stays in the device's own buffers."""
    c = Context(model, **options)
    c.fill(tokens[:300], 0)
    state = c.save(0, ON_DEVICE)
    c.fill(tokens[300:350], 300)
    c.restore(state, 0, ON_DEVICE)
    out = [c.extend(tokens[350:400], 300)]
    c.close()
    return np.concatenate(out)


def cleared(model, tokens, **options):
    """The same request before and after another one; what an emptied cache computes must be the same again."""
    c = Context(model, **options)
    first = c.extend(tokens[:300], 0)
    c.clear()
    c.fill(tokens[100:400], 0)
    c.clear()
    again = c.extend(tokens[:300], 0)
    c.close()
    assert np.array_equal(first, again), "an emptied cache remembers something"
    return again


def many_contexts(model, tokens, **options):
    """Contexts that live at the same time do not see each other's cells."""
    contexts = [Context(model, **options) for _ in range(3)]
    for i, c in enumerate(contexts):
        c.fill(tokens[i * 10 : i * 10 + 200], 0)
    out = [c.extend(tokens[250:260], 200) for c in contexts]
    for c in contexts:
        c.close()
    return np.concatenate(out)


def main():
    plugin, model_path, text_path, *wanted = [word for word in sys.argv[1:] if word != "--floor"]
    assert load_plugin(plugin), "the host did not take the plug-in"
    with open(text_path, encoding="utf-8") as file:
        text = file.read(20000)
    models = [Model(model_path, on_plugin) for on_plugin in (False, True)]
    tokens = models[0].tokens(text, 400)
    for name in wanted:
        function, layout = name.split(":")
        unified = layout == "unified"
        stock, ours = (globals()[function](model, tokens, unified=unified) for model in models)
        top = float((stock.argmax(-1) == ours.argmax(-1)).mean())
        result = {"name": name, "kld": divergence(stock, ours), "top": top, "rows": len(stock)}
        if "--floor" in sys.argv:
            bf16 = globals()[function](models[0], tokens, unified=unified, cache_type=BF16)
            result["floor"] = divergence(stock, bf16)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
