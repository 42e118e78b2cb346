"""``rllib env``: whether an environment of one's own can be trained in, before it is."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rllib_mhgpo.errors import ConfigError

if TYPE_CHECKING:
    from rllib_mhgpo.algorithms.evaluation import System
    from rllib_mhgpo.cli.env_checks import Group

app = typer.Typer(help="Look at environments.", no_args_is_help=True, rich_markup_mode="rich")

EXAMPLES = """
[bold]Examples[/bold]

  rllib env check my_package.my_module:MyEnv --llm mini

  rllib env check text_game --llm mini --env-config '{"game": "pettingzoo.classic.tictactoe_v3"}'

  rllib env check tuned_examples/mhgpo_solver_verifier.yaml
"""


@app.callback()
def _group() -> None:
    """Look at environments."""


@app.command(epilog=EXAMPLES)
def check(
    environment: Annotated[
        str,
        typer.Argument(metavar="MODULE:CLASS|NAME|FILE", help="An environment, or an experiment file."),
    ],
    env_config: Annotated[str | None, typer.Option(help="Its keyword arguments, as JSON.")] = None,
    llm: Annotated[str | None, typer.Option(help="The policy that plays; tiny, or what the file says.")] = None,
    config: Annotated[str | None, typer.Option(help="Settings of the training, as JSON.")] = None,
    roots: Annotated[int, typer.Option(help="How many root inputs are played and shown.", min=1)] = 3,
    verbose: Annotated[int, typer.Option("-v", count=True, help="Show what the libraries say.")] = 0,
) -> None:
    """Test an environment as PettingZoo does and as training needs it; show the groups and rewards MHGPO will see."""
    from rllib_mhgpo.cli.launch import prepare

    prepare(verbose)
    from rllib_mhgpo.cli.env_checks import always_illegal, groups, run_checks

    system = assembled(environment, env_config, llm, config)
    played = list(range(min(roots, int(getattr(system.env, "num_roots", lambda _: roots)("train")))))
    agents = ", ".join(system.env.possible_agents)
    typer.echo(f"{environment}: agents {agents}; policy {system.config.llm}, context {system.context} tokens")
    failed = 0
    for finding in run_checks(system, played):
        failed += not finding.passed
        typer.echo(f"{'ok  ' if finding.passed else 'FAIL'}  {finding.name}: {finding.said}")
    if failed:
        raise ConfigError(f"env check: {failed} of the checks failed.")
    made, trees = groups(system, played)
    typer.echo(report(made))
    for agent, (count, example) in always_illegal(system, trees).items():
        typer.echo(f"warn  all {count} outputs of {agent} are illegal, such as {example!r}")
    for reason in [reason for tree in trees for reason in tree.void][:3]:
        typer.echo(f"voided: {reason}")


def assembled(environment: str, env_config: str | None, llm: str | None, config: str | None) -> "System":
    """Puts together the system to check."""
    from rllib_mhgpo.algorithms.evaluation import assemble
    from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
    from rllib_mhgpo.cli.evaluate import untrained
    from rllib_mhgpo.cli.train import read_json

    changes, own = read_json(env_config, "--env-config"), read_json(config, "--config")
    if Path(environment).suffix in (".yaml", ".yml", ".py"):
        return untrained(Path(environment), changes, {**own, **({"llm": llm} if llm else {})})
    given = {"llm": MHGPOConfig.llm, **own, **({"llm": llm} if llm else {})}
    settings = MHGPOConfig.check({**given, "env": environment, "env_config": changes})
    return assemble(settings, settings.llms, changes)


def report(groups: "list[Group]") -> str:
    """Writes groups as a table: a line each, a number a member."""
    heading = ("root", "agent", "act", "team", "prompts", "specific", "shared", "advantage")
    rows: list[tuple[str, ...]] = [heading]
    for group in groups:
        numbers = (group.specific, group.shared, group.advantage)
        cells = (str(group.root), group.agent, str(group.act), group.team, str(group.prompts))
        rows.append((*cells, *(" ".join(f"{value:.3g}" for value in values) for values in numbers)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heading))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    spread = sum(len(set(group.advantage)) > 1 for group in groups)
    return "\n".join(["", "What MHGPO will see, a line a group, a number a member:", *lines, summary(groups, spread)])


def summary(groups: "list[Group]", spread: int) -> str:
    """Says how many groups can teach anything."""
    hint = "" if spread else "; without any nothing is learned: sample more, or reward more finely"
    return f"{spread} of {len(groups)} groups have different rewards{hint}."
