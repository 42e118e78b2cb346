"""Why trials failed: one clear message a reason, found in the text that Ray makes of errors in other processes."""

import re
from typing import Any

from rich.console import Console

from rllib_mhgpo.errors import MHGPOError


def report_failures(trials: list[Any], verbosity: int) -> None:
    """Prints why trials failed, every reason once; with the whole traceback when asked to be verbose."""
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    reasons: dict[str, Any] = {}  # a dict for its order
    for trial in trials:
        trace = re.sub(r"\x1b\[\d+m", "", str(trial.get_error() or "no reason was recorded"))
        where = f"(traceback: {trial.path}/error.txt, or run again with -v)"
        reasons.setdefault(trace if verbosity else own_message(trace) or f"{last_error(trace)} {where}", trial)
    for reason in reasons:
        errors.print(f"error: {reason}")


def own_message(trace: str) -> str | None:
    """Returns the message of the last error of this package in a traceback's text, None where there is none.

    Ray hands on an error of an actor's constructor as text alone, so the text is what all ways have in common.

    >>> own_message("ray::f()\\nrllib_mhgpo.errors.DataError: a.json: empty.\\nAdd records.\\n")
    'a.json: empty.\\nAdd records.'
    """
    names = "|".join([MHGPOError.__name__, *(kind.__name__ for kind in MHGPOError.__subclasses__())])
    found = re.findall(rf"^{MHGPOError.__module__}\.(?:{names}): (.*?)(?=\n\n\S|\Z)", trace, re.MULTILINE | re.DOTALL)
    return found[-1].strip() if found else None


def last_error(trace: str) -> str:
    """Returns the last line of a traceback's text that names an error and says something.

    >>> last_error("ZeroDivisionError: division by zero\\n\\n...:\\n  raise RuntimeError from e\\nRuntimeError")
    'ZeroDivisionError: division by zero'
    """
    said = re.findall(r"^(?!ray\.exceptions\.RayTaskError)[\w.]+: .+$", trace, re.MULTILINE)
    return str(said[-1]) if said else trace.strip().rpartition("\n")[2]
