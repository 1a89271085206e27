"""A state that cannot be stored makes evaluations fail until the cache is cleared, and restoring is idempotent."""

import ctypes
import sys

from capi import Context, Model, load_plugin

assert load_plugin(sys.argv[1])
model = Model(sys.argv[2], True)
with open(sys.argv[3], encoding="utf-8") as file:
    tokens = model.tokens(file.read(9000), 700)
c = Context(model, n_ctx=1024)
c.fill(tokens[:600], 0)
state = c.save()
c.clear()
c.restore(state)
once = bytes(c.save())
c.restore(state)
print("same", bytes(c.save()) == once)
bad = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
bad[len(bad) // 8 & ~1], bad[(len(bad) // 8 & ~1) + 1] = 0x00, 0x7E  # a NaN among the keys
c.clear()
c.restore(bad)
print("fails", c.fails(tokens[600:610], 600))
c.clear()
print("cleared", not c.fails(tokens[:10], 0))
c.close()
