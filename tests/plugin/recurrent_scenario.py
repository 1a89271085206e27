"""Decodes with a recurrent model on the CPU and on the plug-in's device; prints whether the logits are the same bits."""

import sys

import numpy as np
from capi import Context, Model, load_plugin

plugin, path = sys.argv[1:3]
assert load_plugin(plugin)
runs = []
for on_plugin in (False, True):
    context = Context(Model(path, on_plugin), n_ctx=256, n_seq=2, flash=0)
    tokens = [(7 * i + 3) % 64 for i in range(60)]
    logits = [context.extend(tokens[:40], 0, 0), context.extend(tokens[5:25], 0, 1)]
    context.copy(0, 1)
    logits.append(context.decode(tokens[40:42], [40, 40], [0, 1]))
    state = context.save(0)
    logits.append(context.extend(tokens[41:50], 41, 0))
    context.restore(state, 0)
    logits.append(context.extend(tokens[41:50], 41, 0))
    context.close()
    runs.append(np.concatenate(logits))
print("equal" if np.array_equal(*runs) else f"differ by {np.abs(runs[0] - runs[1]).max()}")
