"""A watch over an engine: slow steps are no fault, no step is one."""

import subprocess
import sys
import time

import pytest

from rllib_mhgpo.engines.stall import Watch
from rllib_mhgpo.errors import EngineError


def test_many_steps_may_take_longer_than_one() -> None:
    watch = Watch(4.0)
    step = watch.follow(lambda: time.sleep(0.5))
    with watch.over():
        for _ in range(10):
            step()
    assert not watch.is_late


def test_a_wait_without_a_step_is_ended() -> None:
    with pytest.raises(EngineError, match=r"no step within sample_timeout_s = 0.2 s"), Watch(0.2).over():
        time.sleep(600)


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError), Watch(600).over():
        _ = 1 / 0


HANGS = """
import threading, time
from rllib_mhgpo.engines import stall

def hang():
    with stall.Watch(0.2).over():
        time.sleep(600)

stall.GRACE_S = 0.2
thread = threading.Thread(target=hang)  # no signal reaches it, as none reaches code that never comes back to Python
thread.start()
thread.join()
"""


def test_a_process_that_cannot_be_called_back_ends_with_a_message() -> None:
    run = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 1
    assert "no step within sample_timeout_s = 0.2 s" in run.stderr
    assert run.stderr.strip().endswith("this process ends.")
