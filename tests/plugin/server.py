"""A llama-server process and the few requests that the tests make."""

import contextlib
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request

from conftest import HOST, host_environment


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, port):
        self.port = port

    def post(self, path, body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def complete(self, prompt, slot, count=16, cache=True):
        """Greedy continuation with the log-probability of every chosen token."""
        answer = self.post(
            "/completion",
            {
                "prompt": prompt,
                "id_slot": slot,
                "n_predict": count,
                "temperature": 0,
                "n_probs": 1,
                "cache_prompt": cache,
                "ignore_eos": True,
            },
        )
        chosen = [(p["token"], p["logprob"]) for p in answer["completion_probabilities"]]
        return chosen, answer["timings"]["cache_n"]

    def slot(self, slot, action, filename=None):
        return self.post(f"/slots/{slot}?action={action}", {"filename": filename} if filename else {})


@contextlib.contextmanager
def running(model, log, *arguments, recipe=None, program=HOST / "bin/llama-server", **extra):
    """A server that answers; stopped the ordinary way at the end, so that it frees what it holds."""
    port = _free_port()
    command = [program, "-m", model, "--host", "127.0.0.1", "--port", port, "-t", 2, "-tb", 2, *arguments]
    env = host_environment(recipe, **extra)
    with open(log, "wb") as out:
        process = subprocess.Popen([str(part) for part in command], stdout=out, stderr=out, env=env)
        try:
            _wait_until_ready(process, port, log)
            yield Server(port)
        finally:
            process.terminate()
            code = process.wait(timeout=300)
    assert code == 0, f"the server ended with {code}: {log}"


def _wait_until_ready(process, port, log):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended early: {log.read_text(errors='replace')[-2000:]}"
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        time.sleep(0.1)
    raise AssertionError(f"the server did not answer in time: {log}")
