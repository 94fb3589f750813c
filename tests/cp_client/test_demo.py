"""The demo: one streamed answer from two ranks, and nothing left running."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.sweep, pytest.mark.cluster]
TIMEOUT_S = 300


def test_m2_the_demo_answers_and_leaves_nothing():
    demo = subprocess.Popen(
        [sys.executable, "-m", "cp_client.demo", "Name", "a", "colour."],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 0, err
    assert out.startswith("\n> Name a colour.\n")
    assert re.search(r"\d+ tokens from ranks \[0, 1\] with 2 KV shards", out)
    pids = [int(pid) for pid in re.findall(r"pid=(\d+)", err)]
    assert len(pids) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
