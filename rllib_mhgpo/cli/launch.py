"""Runs checked experiments through Ray Tune, one after the other, and says how each ended.

Tune does the work: trials, searches, schedulers, checkpoints, progress.csv, TensorBoard, resuming. Added here are
silence, paths that stay relative to where one stands, search spaces by name, a table of the best trials, and refusals
of what Tune would wait for in vain.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from rllib_mhgpo.algorithms.registration import register
from rllib_mhgpo.cli.checks import is_own, variants
from rllib_mhgpo.cli.experiments import Experiment
from rllib_mhgpo.cli.loggers import make_loggers
from rllib_mhgpo.cli.resuming import forget_decisions, places_of, require_earlier_run
from rllib_mhgpo.cli.search_spaces import places, searched
from rllib_mhgpo.cli.tuners import make_scheduler, make_search_alg, metric_of, table_of_best
from rllib_mhgpo.errors import ConfigError

OWN_CHECKPOINTS = {"checkpoint_frequency": 1, "num_to_keep": 2, "checkpoint_at_end": True}
PASSED_ON = ("num_samples", "time_budget_s", "max_failures", "max_concurrent_trials", "resources_per_trial", "restore")


@dataclass(frozen=True)
class RunOptions:
    """How to run, whatever is run.

    Attributes:
        storage_path: where results go when the experiment does not say; Ray's default is ``~/ray_results``.
        resume: continue experiments that were started before.
        loggers: where results go beside CSV, JSON and TensorBoard; see :mod:`rllib_mhgpo.cli.loggers`.
        ray_address: a running cluster; a local one is started otherwise, with ``num_cpus`` and ``num_gpus``.
        verbosity: 0: progress only; 1: Tune's and the workers' output; 2: everything.
    """

    storage_path: str | None = None
    resume: bool = False
    loggers: tuple[str, ...] = ()
    ray_address: str | None = None
    num_cpus: int | None = None
    num_gpus: int | None = None
    verbosity: int = 0


def prepare(verbosity: int) -> None:
    """Sets what Ray and the model libraries read from the process before they are imported."""
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # relative paths mean what they meant on the command line
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # interrupts are handled here
    os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")
    if verbosity:
        return
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # Tune's newer output prints headers at verbosity 0 too
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    import ray.rllib  # noqa: F401  # sets its log levels when it is imported

    for name in ("ray", "ray.rllib", "ray.tune"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def launch(
    experiments: Mapping[str, Experiment], algorithms: Mapping[str, type], options: RunOptions, console: Console
) -> int:
    """Runs the experiments and returns the exit code: 0, 1 where a trial failed, 130 after an interrupt.

    Args:
        experiments: checked experiments by name.
        algorithms: the class of each.

    Raises:
        ConfigError: nothing to resume.
    """
    if options.resume:
        storages = {name: storage_of(experiment, options) for name, experiment in experiments.items()}
        require_earlier_run(storages)
        for place in places_of(storages):
            forget_decisions(place)
    from rllib_mhgpo.cli.interrupts import EXIT_CODE as INTERRUPTED

    code = 0
    with local_ray(options.verbosity, options.ray_address, num_cpus=options.num_cpus, num_gpus=options.num_gpus):
        for name, experiment in experiments.items():
            code = max(code, _run(name, experiment, algorithms[name], options, console))
            if code == INTERRUPTED:
                break
    return code


@contextmanager
def local_ray(verbosity: int, address: str | None = None, **resources: int | None) -> Iterator[None]:
    """Starts Ray here, or joins the cluster at ``address`` (or RAY_ADDRESS), and leaves it at the end.

    Raises:
        ConfigError: no cluster is there.
    """
    import ray

    address = address or os.environ.get("RAY_ADDRESS", "local")
    try:
        ray.init(
            address=address,
            logging_level=logging.INFO if verbosity else logging.CRITICAL,
            log_to_driver=verbosity > 0,
            **({"include_dashboard": False, **resources} if address == "local" else {}),
        )
    except ConnectionError as error:
        raise ConfigError(f"--ray-address: no Ray cluster at {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _run(name: str, experiment: Experiment, algorithm: type, options: RunOptions, console: Console) -> int:
    from rllib_mhgpo.cli.failures import report_failures
    from rllib_mhgpo.cli.interrupts import EXIT_CODE, interruptible, report_interrupt
    from rllib_mhgpo.cli.progress import PLAIN, Progress

    register()
    if not options.ray_address:
        require_resources(experiment, algorithm)
    grids, domains = places(searched(experiment["config"]))
    progress = Progress(console, experiment["stop"], [*grids, *domains])
    with progress, interruptible(progress) as interrupted:
        trials = _tune(name, experiment, algorithm, options, progress)
    if interrupted.is_set():
        report_interrupt(progress)
        return EXIT_CODE
    failures = [trial for trial in trials if trial.status == "ERROR"]
    progress.report(name, trials, without=failures)
    if len(trials) > 1:
        for line in table_of_best(trials, progress.names, **metric_of(experiment)):
            console.print(line, **PLAIN)
    report_failures(failures, options.verbosity)
    return 1 if failures else 0


def _tune(name: str, experiment: Experiment, algorithm: type, options: RunOptions, progress: Any) -> list[Any]:
    """Runs one experiment and returns its trials, ended, failed or interrupted."""
    from pyarrow import ArrowInvalid
    from ray import tune

    from rllib_mhgpo.cli.failures import own_message
    from rllib_mhgpo.cli.stops import Stops

    storage = storage_of(experiment, options)
    # a kill costs the iteration at work, and what ended less than these seconds before
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "10" if "://" in (storage or "") else "1")
    try:
        analysis = tune.run(
            algorithm,
            name=name,
            config=config_for(algorithm, experiment),
            stop=experiment["stop"],
            storage_path=storage,
            checkpoint_config=tune.CheckpointConfig(**checkpoints_of(experiment, algorithm)),
            scheduler=make_scheduler(experiment.get("scheduler")),
            search_alg=make_search_alg(experiment.get("search_alg")),
            **(metric_of(experiment) if is_search(experiment) else {}),
            resume="AUTO+ERRORED" if options.resume else None,
            verbose=options.verbosity,
            callbacks=[progress, Stops(is_own(algorithm)), *make_loggers(options.loggers, name)],
            raise_on_failed_trial=False,
            **{key: experiment[key] for key in PASSED_ON if key in experiment},
        )
    except (tune.TuneError, OSError, ArrowInvalid) as error:
        said = own_message(str(error)) or f"Tune cannot run it: {error}"
        raise ConfigError(f"{name}: {said}") from error
    return list(analysis.trials)


def storage_of(experiment: Experiment, options: RunOptions) -> str | None:
    """Returns where results go: an absolute path or a URI, None for Ray's default."""
    path = options.storage_path or experiment.get("storage_path")
    return path if path is None or "://" in path else str(Path(path).expanduser().absolute())


def checkpoints_of(experiment: Experiment, algorithm: type) -> dict[str, Any]:
    """Returns the checkpoint settings; this package's algorithms save every iteration unless told otherwise.

    What must survive an interrupt has to be on disk at the end of each iteration, for Tune then gives actors no time.
    """
    return {**(OWN_CHECKPOINTS if is_own(algorithm) else {}), **experiment["checkpoint_config"]}


def config_for(algorithm: type, experiment: Experiment) -> dict[str, Any]:
    """Returns the config as Tune gets it: RLlib's algorithms do not know ``module:Class`` and get the class itself."""
    config: dict[str, Any] = searched(experiment["config"])
    env = config.get("env")
    if isinstance(env, str) and ":" in env and not is_own(algorithm):
        module, _, name = env.partition(":")
        config["env"] = getattr(import_module(module), name, env)
    return config


def is_search(experiment: Experiment) -> bool:
    """True where a scheduler or a search algorithm compares trials."""
    return bool(experiment.get("scheduler") or experiment.get("search_alg"))


def require_resources(experiment: Experiment, algorithm: Any) -> None:
    """Raises a ConfigError for a trial that the local cluster can never place; Tune would wait for ever."""
    import ray

    for config in variants(experiment["config"]):
        request = getattr(algorithm, "default_resource_request", lambda _: None)(config)
        there = ray.cluster_resources()
        for kind, needed in (request.required_resources if request else {}).items():
            if needed > there.get(kind, 0):
                raise ConfigError(
                    f"config: a trial needs {needed:g} {kind}s, this machine has {there.get(kind, 0):g}; lower "
                    f"num_env_runners or num_learners, or let it share them: --ray-num-{kind.lower()}s {needed:g}."
                )
