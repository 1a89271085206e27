#!/usr/bin/env python3
"""Retrieval from a long context: facts hidden in running text, asked for one by one behind it.

Every trial is a text of --tokens tokens with four codes at even depths. The text is read once per cache; each question is appended,
answered greedily and taken out again. A cache is scored on the questions that the host's own f16 cache answers. Runs the
binding of build/venv (llama-cpp-python); a cache is `stock:TYPE` or a recipe."""

import argparse
import json
import pathlib
import random

import one_cache

CITIES = ["Lisbon", "Oslo", "Cairo", "Kyoto"]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one_cache.add_arguments(parser)
    parser.add_argument("--caches", default="f16; near-lossless; balanced; small; kivi; kitty; stock:q4_0",
                        help="separated by ';'; stock:f16 is always run first")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--json", type=pathlib.Path, help="file for every answer")
    return parser.parse_args()


def haystack(model, text, count, trial):
    """Tokens of the text with one code per city, at depths 1/8, 3/8, ... of it; and the codes."""
    codes = [str(random.Random(f"{trial} {city}").randrange(10000, 100000)) for city in CITIES]
    cities = random.Random(trial).sample(CITIES, len(CITIES))
    facts = [f" The secret code of the {city} office is {codes[CITIES.index(city)]}. " for city in cities]
    room = count - len(CITIES) * 24 - 64
    words = model.tokens(text[trial * 40000 :], room)
    step = len(words) // len(CITIES)
    tokens = words[:1]
    for i, fact in enumerate(facts):
        begin, middle, end = i * step, i * step + step // 2, (i + 1) * step
        tokens += words[max(begin, 1) : middle] + plain_tokens(model, fact) + words[middle:end]
    return tokens, dict(zip(CITIES, codes))


def plain_tokens(model, text):
    import llama_cpp

    raw = text.encode()
    buffer = (llama_cpp.llama_token * (len(raw) + 8))()
    return list(buffer[: llama_cpp.llama_tokenize(model.vocab, raw, len(raw), buffer, len(buffer), False, False)])


def piece(model, token):
    import ctypes

    import llama_cpp

    buffer = ctypes.create_string_buffer(64)
    size = llama_cpp.llama_token_to_piece(model.vocab, token, buffer, len(buffer), 0, False)
    return buffer.raw[: max(size, 0)].decode(errors="replace")


def answer(model, context, question, position):
    """What follows the question, eight tokens, greedily; the cache is as before afterwards."""
    asked = plain_tokens(model, question)
    logits = context.extend(asked, position, only_last=True)
    written, at = "", position + len(asked)
    for _ in range(8):
        token = int(logits[-1].argmax())
        written += piece(model, token)
        logits = context.extend([token], at)
        at += 1
    context.remove(0, position, -1)
    return written


def run_cache(options):
    """Prints one line of JSON per question: trial, city, right."""
    capi, model = one_cache.open_model(options)
    text = options.text.read_text(encoding="utf-8")
    for trial in range(options.trials):
        tokens, codes = haystack(model, text, options.tokens, trial)
        context = capi.Context(model, n_ctx=options.tokens, ubatch=128, cache_type=one_cache.cache_type(options))
        for first in range(0, len(tokens), 512):
            context.extend(tokens[first : first + 512], first, only_last=True)
        for city, code in codes.items():
            question = f"\n\nQuestion: What is the secret code of the {city} office?\nAnswer: The secret code of the {city} office is"
            written = answer(model, context, question, len(tokens))
            print(json.dumps({"trial": trial, "city": city, "right": code in written, "answer": written}), flush=True)
        context.close()


def main():
    options = parse_arguments()
    if options.one:
        return run_cache(options)
    caches = ["stock:f16", *(part.strip() for part in options.caches.split(";") if part.strip())]
    results = {}
    for cache in caches:
        results[cache] = [json.loads(line) for line in one_cache.run_process(cache).splitlines() if line.startswith("{")]
        known = [i for i, row in enumerate(results["stock:f16"]) if row["right"]]
        right = sum(results[cache][i]["right"] for i in known)
        print(f"{cache:<16} {right:3} of {len(known)} codes that stock f16 finds (of {len(results[cache])})", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
