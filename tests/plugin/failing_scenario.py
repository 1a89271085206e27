"""Decodes, with the plug-in, a model whose keys are too large; prints what became of it."""

import sys

from capi import Context, Model, load_plugin

plugin, path = sys.argv[1:3]
assert load_plugin(plugin)
context = Context(Model(path, True), n_ctx=256)
outcomes = []
for _ in range(2):
    try:
        context.extend([1, 2, 3], 0)
        outcomes.append("accepted")
    except AssertionError as error:
        outcomes.append("refused" if "llama_decode gave" in str(error) else repr(error))
context.close()
print(outcomes[0] if outcomes[0] == outcomes[1] else outcomes)
