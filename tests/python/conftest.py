"""Settings of every Python test."""

import os

import hypothesis

# One thread: results do not depend on it (test_threads.py), and the package beside kvant uses one as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile(
    "kvant",
    deadline=None,
    max_examples=int(os.environ.get("KVANT_EXAMPLES", "150")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    print_blob=True,
)
hypothesis.settings.load_profile("kvant")
