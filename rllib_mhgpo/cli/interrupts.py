"""Ctrl-C or a cluster's SIGTERM during a run: Tune saves the experiment's state, and all has ended within ten seconds.

Tune alone would wait for the iteration at work, then ten seconds more; what matters is on disk by then, so actors that
are still at work after a grace period are killed.
"""

import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rllib_mhgpo.cli.progress import PLAIN, Progress

EXIT_CODE = 130
GRACE_S = 3.0  # Ray takes two or three seconds more to shut down


@contextmanager
def interruptible(progress: Progress) -> Iterator[threading.Event]:
    """Lets Ctrl-C and SIGTERM end the run in order: state is saved, actors are asked to stop, then killed.

    A second signal raises KeyboardInterrupt at once.

    Yields:
        The event that is set by the first.
    """
    interrupted = threading.Event()

    def on_interrupt(number: int, frame: Any) -> None:
        tune_stops = signal.getsignal(signal.SIGUSR1)
        if interrupted.is_set() or not callable(tune_stops):
            raise KeyboardInterrupt
        interrupted.set()
        progress.console.print("Stopping; Ctrl-C again to stop at once.")
        tune_stops(number, frame)
        signal.signal(number, on_interrupt)  # Tune's handler puts back the one that it found
        actors = [trial.temporary_state.ray_actor for trial in progress.trials]
        timer = threading.Timer(GRACE_S, _kill, args=[[actor for actor in actors if actor is not None]])
        timer.daemon = True
        timer.start()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_interrupt)
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(actors: list[Any]) -> None:
    import ray

    for actor in actors:
        if ray.is_initialized():
            ray.kill(actor)


def report_interrupt(progress: Progress) -> None:
    """Says what is safe and how to go on."""
    for row in progress.rows.values():
        where = f"iteration {row.saved} is saved in {row.checkpoint}" if row.checkpoint else "no iteration is saved yet"
        progress.console.print(f"Interrupted: {where}", **PLAIN)
    arguments = [Path(sys.argv[0]).name, *sys.argv[1:]]
    resume = [] if "--resume" in arguments else ["--resume"]
    progress.console.print(f"Go on with: {shlex.join([*arguments, *resume])}", **PLAIN)
