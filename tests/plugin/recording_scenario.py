"""Writes the state of a sequence, held by the host and by the plug-in, to files: PLUGIN MODEL TEXT STOCK OURS."""

import sys

from capi import Context, Model, load_plugin

plugin, path, text, *outputs = sys.argv[1:]
assert load_plugin(plugin)
with open(text, encoding="utf-8") as file:
    words = file.read(4000)
for on_plugin, output in zip((False, True), outputs, strict=True):
    model = Model(path, on_plugin)
    tokens = model.tokens(words, 70)
    context = Context(model, n_ctx=256)
    context.extend(tokens[:45], 0)
    context.extend(tokens[45:], 45)
    with open(output, "wb") as file:
        file.write(bytes(context.save(0)))
    context.close()
