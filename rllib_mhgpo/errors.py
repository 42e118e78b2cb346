"""The one vocabulary of failures that a user can cause or meet.

Every message says what was expected, what was found (file, record, key) and what to do. Anything that is not a
:class:`MHGPOError` is a fault of the program and is raised as it is.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class MHGPOError(Exception):
    """A failure with one clear message for the user; the command line prints it without a traceback."""


class ConfigError(MHGPOError, ValueError):
    """A configuration that cannot be run."""


class DataError(MHGPOError, ValueError):
    """A question file, corpus or prediction file that cannot be read as what it should be."""


class RetrievalError(MHGPOError, RuntimeError):
    """A retriever that cannot answer, or an index that does not fit its corpus or encoder."""


class ModelError(MHGPOError, ValueError):
    """A language model folder that cannot be loaded or used."""


class CheckpointError(MHGPOError, RuntimeError):
    """A checkpoint that cannot be written or restored."""


class EngineError(MHGPOError, RuntimeError):
    """An engine that cannot start, or that failed and is of no more use; a runner with one is replaced."""


class SyncError(MHGPOError, RuntimeError):
    """An engine whose weights are not the learner's after they were handed over."""


class RolloutError(MHGPOError, RuntimeError):
    """One rollout went bad: it is voided and counted; the run goes on."""


USUAL = {
    "learning_rate": "lr", "batch_size": "questions_per_iteration", "train_batch_size": "questions_per_iteration",
    "num_generations": "group_size", "beta": "kl_beta", "kl_coef": "kl_beta", "kl_coeff": "kl_beta",
    "max_tokens": "max_response_tokens", "max_completion_length": "max_response_tokens", "model": "llm",
    "num_sgd_iter": "num_epochs", "clip_param": "clip_high", "epsilon": "clip_high", "num_workers": "num_env_runners",
}  # fmt: skip
"""What other trainers call keys of the configuration."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ``" Did you mean 'x'?"`` for the nearest known word, or an empty string.

    >>> did_you_mean("group_sise", ["group_size", "lr"])
    " Did you mean 'group_size'?"
    >>> did_you_mean("learning_rate", ["group_size", "lr"])
    " Did you mean 'lr'?"
    """
    words = list(known)
    nearest = [USUAL[word]] if USUAL.get(word) in words else get_close_matches(word, words, n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
