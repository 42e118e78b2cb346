"""YAML 1.2 in and out: ``5e-7`` is a number, ``no`` is a word, and a mistake is named with its line and column.

Dates, and numbers with underscores, stay the text they are: configuration has answers and names in it, never points in
time, and ``2024_05_01`` is a name.
"""

import re
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from rllib_mhgpo.errors import ConfigError


class _Constructor(SafeConstructor):
    """Safe types, without dates."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: _text(node))
for _tag, _number in (("int", SafeConstructor.construct_yaml_int), ("float", SafeConstructor.construct_yaml_float)):
    _Constructor.add_constructor(
        f"tag:yaml.org,2002:{_tag}",
        lambda maker, node, number=_number: _text(node) if "_" in node.value else number(maker, node),
    )


class _Representer(SafeRepresenter):
    """Safe types; a tuple is written as a list, anything else that YAML has no form for as the text it prints."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Representer.add_representer(tuple, lambda representer, value: representer.represent_list(list(value)))
_Representer.add_representer(None, lambda representer, value: representer.represent_str(_named(value)))


def _text(node: ScalarNode) -> str:
    return str(node.value)


def _named(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}" if isinstance(value, type) else str(value)


def _yaml() -> Any:
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.Representer = _Constructor, _Representer
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False
    yaml.width = 110
    return yaml


def parse_yaml(text: str, source: str) -> Any:
    """Reads one YAML 1.2 document.

    Args:
        source: what to call the text in a message.

    Raises:
        ConfigError: the text is no YAML, or says that it is of another version; with line and column.

    >>> parse_yaml("run: 2024_05_01", "example")
    {'run': '2024_05_01'}
    >>> parse_yaml("{lr: 1e-5, max_steps: 1e5, answer: no, born: 1815-12-10}", "example")
    {'lr': 1e-05, 'max_steps': 100000.0, 'answer': 'no', 'born': '1815-12-10'}
    """
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"%YAML\s+(?!\s|1\.2\s*(#|$))", line):
            raise ConfigError(f"{source}, line {number}: expected YAML 1.2, found {line.strip()}; remove the line.")
    try:
        return _yaml().load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}{place}: not valid YAML: {error.problem or error.context}.") from None
    except YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}.") from None


def read_yaml(path: Path) -> Any:
    """Reads a YAML file.

    Raises:
        ConfigError: no such file, not UTF-8, or not YAML.
    """
    try:
        return parse_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, found byte {error.object[error.start]:#x}.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None


def format_yaml(value: Any) -> str:
    """Writes a value as YAML 1.2; what has no YAML form is written as the text it prints.

    >>> print(format_yaml({"lr": 1e-5, "answer": "no", "layers": (8, 8)}), end="")
    lr: 1e-05
    answer: no
    layers:
    - 8
    - 8
    """
    stream = StringIO()
    _yaml().dump(value, stream)
    return stream.getvalue()
