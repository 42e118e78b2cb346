"""``rllib train``: from a file, or from an algorithm and an environment named on the command line."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rllib_mhgpo.cli.experiments import Experiment, change, load_experiments, normalise
from rllib_mhgpo.cli.yaml12 import format_yaml
from rllib_mhgpo.errors import ConfigError

app = typer.Typer(help="Train an algorithm.", rich_markup_mode="rich")

FILE_EXAMPLES = """
[bold]Examples[/bold]

  rllib train file tuned_examples/mhgpo_hotpot.yaml

  rllib train file my.yaml --set lr=1e-5 --set env_config.questions=hotpot_train.json

  rllib train file my.yaml --stop '{"training_iteration": 2}' --dry-run

  rllib train file my.py --resume
"""
RUN_EXAMPLES = """
[bold]Examples[/bold]

  rllib train --algo MHGPO --env search --stop '{"training_iteration": 20}'

  rllib train --algo PPO --env CartPole-v1 --config '{"lr": 1e-4}' --stop '{"time_total_s": 60}'

  rllib train file FILE   (see rllib train file --help)
"""


def read_json(text: str | None, option: str) -> dict[str, Any]:
    """Reads a JSON object from the command line, empty when the option is absent.

    Raises:
        ConfigError: not JSON, or not an object.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option}: not valid JSON at character {error.pos + 1}: {error.msg}; found {text}") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{option}: expected a JSON object such as {{"training_iteration": 10}}, found {text}')
    return value


# The options of both commands, each with its default; a command takes them as keyword arguments.
OPTIONS: dict[str, tuple[Any, Any]] = {
    "env": (
        Annotated[str | None, typer.Option(help="Environment: search, a Gymnasium id, or module:Class.")],
        None,
    ),
    "stop": (Annotated[str | None, typer.Option(help="When to stop, as JSON, instead of what the file says.")], None),
    "set_": (
        Annotated[
            list[str] | None,
            typer.Option(
                "--set", metavar="KEY.PATH=VALUE", help="Change one setting; the value is typed as YAML. Repeatable."
            ),
        ],
        None,
    ),
    "dry_run": (
        Annotated[
            bool,
            typer.Option(
                "--dry-run", help="Print the resolved experiment as YAML, look at its files, plan its memory, stop."
            ),
        ],
        False,
    ),
    "experiment_name": (Annotated[str | None, typer.Option(help="Name of the results folder.")], None),
    "storage_path": (
        Annotated[str | None, typer.Option(help="Where results go, a folder or a URI; ~/ray_results by default.")],
        None,
    ),
    "resume": (Annotated[bool, typer.Option("--resume", help="Continue the experiment that was interrupted.")], False),
    "checkpoint_freq": (Annotated[int | None, typer.Option(help="Iterations between checkpoints.", min=0)], None),
    "checkpoint_at_end": (Annotated[bool, typer.Option("--checkpoint-at-end", help="Save one at the end.")], False),
    "keep_checkpoints_num": (Annotated[int | None, typer.Option(help="How many checkpoints to keep.", min=1)], None),
    "scheduler": (Annotated[str | None, typer.Option(help="Tune scheduler, such as asha or pbt.")], None),
    "scheduler_config": (Annotated[str | None, typer.Option(help="The scheduler's arguments, as JSON.")], None),
    "search_alg": (Annotated[str | None, typer.Option(help="Tune search algorithm, such as optuna.")], None),
    "search_alg_config": (Annotated[str | None, typer.Option(help="The search algorithm's arguments, as JSON.")], None),
    "profile": (
        Annotated[bool, typer.Option("--profile", help="Trace the second iteration, for chrome://tracing.")],
        False,
    ),
    "logger": (
        Annotated[list[str] | None, typer.Option(help="Log to wandb, mlflow or aim too. Repeatable.")],
        None,
    ),
    "ray_address": (
        Annotated[str | None, typer.Option(help="A running Ray cluster; by default one starts here.")],
        None,
    ),
    "ray_num_cpus": (Annotated[int | None, typer.Option(help="CPUs of the cluster that starts here.", min=1)], None),
    "ray_num_gpus": (Annotated[int | None, typer.Option(help="GPUs of the cluster that starts here.", min=0)], None),
    "verbose": (
        Annotated[int, typer.Option("-v", count=True, help="Show Tune's and the workers' output; -vv: more of it.")],
        0,
    ),
}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command that ends in ``**chosen`` the parameters of :data:`OPTIONS`, for Typer to see."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in OPTIONS.items()
    ]
    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ |= {name: annotation for name, (annotation, _) in OPTIONS.items()}
    return command


@app.callback(invoke_without_command=True, epilog=RUN_EXAMPLES)
@with_options
def run(
    context: typer.Context,
    algo: Annotated[str | None, typer.Option(help="Algorithm: MHGPO, or one of RLlib's, such as PPO.")] = None,
    config: Annotated[str | None, typer.Option(help="Settings of the algorithm, as JSON.")] = None,
    num_samples: Annotated[int, typer.Option(help="How often to repeat every trial.", min=1)] = 1,
    **chosen: Any,
) -> None:
    """Train an algorithm named here, or experiments from a file."""
    if context.invoked_subcommand is not None:
        return
    if algo is None:
        raise ConfigError("train: expected --algo NAME, or `rllib train file FILE`; see rllib train --help.")
    spec = {"run": algo, "config": read_json(config, "--config"), "num_samples": num_samples}
    name = re.sub(r'[/<>:"\\|?*]', "-", "_".join([algo, chosen["env"]] if chosen["env"] else [algo]))  # a folder's
    start({name: normalise(spec, "command line")}, chosen)


@app.command(epilog=FILE_EXAMPLES)
@with_options
def file(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A .yaml file of experiments, or a .py file.")],
    **chosen: Any,
) -> None:
    """Train from a file.

    A YAML file holds experiments, each with run, env, stop, config, num_samples, checkpoint_config;
    grid_search may stand anywhere in config. It is read as YAML 1.2.

    A Python file defines config, an AlgorithmConfig, and optionally stop.
    """
    from rllib_mhgpo.cli.launch import prepare

    prepare(chosen["verbose"])
    start(load_experiments(path), chosen)


def start(experiments: dict[str, Experiment], chosen: Mapping[str, Any]) -> None:
    """Applies the command line to the experiments, checks them all, and prints or runs them.

    Args:
        experiments: by name.
        chosen: the options of the command, by parameter name.
    """
    from rllib_mhgpo.cli.launch import RunOptions, launch, prepare
    from rllib_mhgpo.cli.loggers import check_loggers

    if chosen["experiment_name"]:
        if len(experiments) > 1:
            raise ConfigError(
                f"--experiment-name: the file has {len(experiments)} experiments: {', '.join(experiments)}."
            )
        experiments = {chosen["experiment_name"]: next(iter(experiments.values()))}
    experiments = {name: apply_options(experiment, chosen) for name, experiment in experiments.items()}
    options = RunOptions(
        storage_path=chosen["storage_path"],
        resume=chosen["resume"],
        loggers=tuple(chosen["logger"] or ()),
        ray_address=chosen["ray_address"],
        num_cpus=chosen["ray_num_cpus"],
        num_gpus=chosen["ray_num_gpus"],
        verbosity=chosen["verbose"],
    )
    check_loggers(options.loggers)
    prepare(options.verbosity)
    from rllib_mhgpo.cli.checks import check, peek, resolved, unread
    from rllib_mhgpo.cli.plan import show_plan

    algorithms = {name: check(name, experiment) for name, experiment in experiments.items()}
    if chosen["dry_run"]:
        shown = {name: resolved(algorithms[name], experiment) for name, experiment in experiments.items()}
        typer.echo(format_yaml(shown), nl=False)
        for name, experiment in experiments.items():
            peek(name, algorithms[name], experiment)
            show_plan(name, algorithms[name], experiment["config"])
        return
    for name, experiment in experiments.items():
        if said := unread(algorithms[name], experiment):
            typer.echo(f"warning: {name}: {said}.", err=True)
    raise typer.Exit(launch(experiments, algorithms, options, Console()))


def apply_options(experiment: Experiment, chosen: Mapping[str, Any]) -> Experiment:
    """Returns the experiment as the command line changes it; ``--set`` comes last and wins."""
    made: Experiment = {key: dict(value) if isinstance(value, dict) else value for key, value in experiment.items()}
    if chosen["env"]:
        made["config"]["env"] = chosen["env"]
    if chosen["profile"]:
        made["config"]["profile"] = True
    if chosen["stop"] and chosen["resume"]:
        raise ConfigError("--stop: a resumed experiment ends where it was told to at its start; leave --stop out.")
    if chosen["stop"]:
        made["stop"] = read_json(chosen["stop"], "--stop")
    given = {
        "checkpoint_frequency": chosen["checkpoint_freq"],
        "checkpoint_at_end": chosen["checkpoint_at_end"] or None,
        "num_to_keep": chosen["keep_checkpoints_num"],
    }
    made["checkpoint_config"] |= {key: value for key, value in given.items() if value is not None}
    for key, option in (("scheduler", "--scheduler"), ("search_alg", "--search-alg")):
        settings = read_json(chosen[f"{key}_config"], f"{option}-config")
        if settings and not chosen[key]:
            raise ConfigError(f"{option}-config needs {option}.")
        if chosen[key]:
            made[key] = {"name": chosen[key], **settings}
    for assignment in chosen["set_"] or []:
        change(made, assignment)
    return normalise(made, "command line")
