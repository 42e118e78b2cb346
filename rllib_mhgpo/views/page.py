"""One self-contained HTML file: a template with its style, its script and its data, and a policy that forbids the rest.

Data are JSON inside the page, in which no ``<`` is left; the page's policy allows this one script and no request.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rllib_mhgpo.errors import DataError

HERE = Path(__file__).parent
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {script}; base-uri 'none'"


def make_page(name: str, title: str, data: Mapping[str, Any], body: str = "", refresh: int | None = None) -> str:
    """Fills the template ``name``.

    Args:
        data: what the template's script reads, by the id of its element.
        body: markup made by this package, every foreign text in it escaped.
        refresh: seconds after which the page is loaded again.
    """
    script = _read(f"{name}.js", "")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = POLICY.format(script=f"'sha256-{digest}'" if script else "'none'")
    values = {
        "policy": html.escape(policy),
        "refresh": f'<meta http-equiv="refresh" content="{refresh}">' if refresh else "",
        "title": html.escape(title),
        "style": _read("page.css") + _read(f"{name}.css", ""),
        "data": "\n".join(
            f'<script type="application/json" id="{key}">{as_json(value)}</script>' for key, value in data.items()
        ),
        "script": f"<script>{script}</script>" if script else "",
        "body": body,
    }
    page, (first, *rest) = [], _read(f"{name}.html").split("{{")
    for part in rest:  # each value once, in one pass: what is in a value is never filled in
        key, _, after = part.partition("}}")
        page += [values[key], after]
    return first + "".join(page)


def as_json(value: Any) -> str:
    """Writes JSON that may stand in a page: no tag can begin in it, and what is no number is null.

    >>> as_json({"a": ["</script>", float("nan")]})
    '{"a":["\\\\u003c/script>",null]}'
    """
    text = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # inside JSON these stand in strings alone; line separators end a line in old script engines
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def finite(value: Any) -> Any:
    """Replaces numbers that are not finite by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def write_page(path: Path, page: str) -> None:
    """Writes a page, whole or not at all.

    Raises:
        DataError: the place cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(page, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}.") from None
    finally:
        part.unlink(missing_ok=True)


def _read(name: str, missing: str | None = None) -> str:
    file = HERE / name
    return missing if missing is not None and not file.is_file() else file.read_text(encoding="utf-8")
