"""The layout and its promises: links, lazy imports, who may import whom, and that the README says what is so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def modules_after(statement: str) -> set[str]:
    """Top-level names of third-party modules that a new process has loaded from files after a statement."""
    code = (
        f"import sys; before = set(sys.modules); {statement}\n"
        "new = {name for name, module in sys.modules.items() if getattr(module, '__file__', None)} - before\n"
        "print(*{name.partition('.')[0] for name in new} - sys.stdlib_module_names)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("envs", "rllib_mhgpo/envs"),
        ("algorithms", "rllib_mhgpo/algorithms"),
        ("rllib_mhgpo/tuned_examples", "tuned_examples"),
    ],
)
def test_links_resolve_inside_the_repository(link: str, target: str) -> None:
    assert (ROOT / link).is_symlink()
    assert not os.path.isabs(os.readlink(ROOT / link))
    assert (ROOT / link).resolve() == (ROOT / target).resolve()
    assert (ROOT / target).is_dir()


def test_importing_the_package_loads_nothing_else() -> None:
    assert modules_after("import rllib_mhgpo, rllib_mhgpo.errors, rllib_mhgpo.algorithms.registration") == {
        "rllib_mhgpo"
    }


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import rllib_mhgpo

    with pytest.raises(AttributeError, match="NoSuchAlgorithm"):
        _ = rllib_mhgpo.NoSuchAlgorithm


def test_credit_loads_numpy_and_nothing_heavier() -> None:
    assert modules_after("import rllib_mhgpo.credit") <= {"rllib_mhgpo", "numpy"}


def test_asking_for_help_loads_neither_ray_nor_torch() -> None:
    loaded = modules_after("import rllib_mhgpo.cli")
    assert not loaded & {"ray", "torch", "transformers", "numpy", "pyarrow"}, loaded


def test_import_contract() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.is_file():
        pytest.skip("import-linter is not installed (extra dev)")
    run = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:]


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_is_short_and_names_what_is_there() -> None:
    assert len(readme().splitlines()) <= 150
    links = re.findall(r"\]\((?!http)([^)#]+)\)", readme())
    rooms = re.findall(r"(?:^|\s{2,})(\w[\w/]*(?:/|\.py))(?=\s)", readme().partition("Where things are")[2])
    assert len(rooms) > 10
    missing = [link for link in links if not (ROOT / link).exists()]
    missing += [room for room in rooms if not any((place / room).exists() for place in (ROOT, ROOT / "rllib_mhgpo"))]
    assert not missing


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"install", "train", "test", "lint", "clean"} <= targets
    assert set(re.findall(r"`?make ([\w-]+)", readme())) <= targets


def test_constraints_pin_every_dependency() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cpu"], *extras["dev"]]
    names = {re.split(r"[\[><=]", requirement)[0].lower() for requirement in wanted} - {project["name"]}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert names <= {name.lower() for name in pins}
    assert not any("+" in version for version in pins.values()), "a local version is no release"
