"""An engine that makes no step for too long: waiting for it ends with an error, and where that cannot be, the process.

What counts is the time since the last step, not how long a call takes: a slow engine is no fault.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rllib_mhgpo.errors import EngineError

log = logging.getLogger(__name__)
GRACE_S = 30.0
"""How long the error may take to end the wait; code that never comes back to Python does not hear of it."""


class Watch:
    """Watches one engine's calls.

    Args:
        seconds: longest time without a step; infinite for any.
    """

    def __init__(self, seconds: float = float("inf")) -> None:
        self.seconds, self.last, self.is_late = seconds, 0.0, False

    def follow(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that makes a step and notes when."""

        def noted() -> Any:
            made = step()
            self.last = time.monotonic()
            return made

        return noted

    @contextmanager
    def over(self) -> Iterator[None]:
        """The context of a call.

        Raises:
            EngineError: no step for too long.
        """
        if self.seconds == float("inf"):
            yield
            return
        self.last, self.is_late = time.monotonic(), False
        ended, interruptible = threading.Event(), threading.current_thread() is threading.main_thread()
        edge = threading.Lock()  # a call either has ended or is late
        before = signal.signal(signal.SIGALRM, self._raise) if interruptible else None
        threading.Thread(target=self._wait, args=(ended, edge, interruptible), daemon=True).start()
        try:
            yield
        except Exception as error:
            if self.is_late:
                raise self._error() from error
            raise
        finally:
            try:
                if interruptible:
                    signal.signal(signal.SIGALRM, signal.SIG_IGN)
            finally:  # also where the alarm came just now
                with edge:
                    ended.set()
                if interruptible:
                    signal.signal(signal.SIGALRM, before)

    def _wait(self, ended: threading.Event, edge: threading.Lock, interruptible: bool) -> None:
        while (left := self.last + self.seconds - time.monotonic()) > 0:
            if ended.wait(left):
                return
        with edge:
            if ended.is_set():
                return
            self.is_late = True
            if interruptible:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        if not ended.wait(GRACE_S):
            log.critical("%s It does not come back; this process ends.", self._error())
            os._exit(1)

    def _raise(self, *_: Any) -> None:
        raise self._error()

    def _error(self) -> EngineError:
        return EngineError(
            f"engine: no step within sample_timeout_s = {self.seconds:g} s: it hangs, or one of its processes does. Go "
            "on from the last checkpoint with --resume; with num_env_runners above 0 a runner is replaced instead."
        )
