"""`expertmesh serve --config FILE`: the command's options and the front door's sections in YAML.

Precedence, first wins: flag, environment (EXPERTMESH_SERVE_PORT for --port), file, default.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import ValidationError

from expertmesh.deploy.edge_settings import SECTIONS, EdgeSettings
from expertmesh.deploy.exit_codes import ExitCode, Refused

_BOOLEAN = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """`on`, `off`, `yes` and `no` are words, as in YAML 1.2: options have such values."""

    yaml_implicit_resolvers: dict[str, Any] = {  # noqa: RUF012 (declared so by the base)
        letter: [one for one in found if one[0] != _BOOLEAN or letter in "tTfF"]
        for letter, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_config(
    path: Path, options: Mapping[str, Callable[[Any], Any]]
) -> tuple[dict[str, Any], EdgeSettings]:
    """(values by option name, the sections). Raises Refused naming the first bad key.

    options: what a file may set, by the names of the flags with underscores, and what raises
    BadParameter for values that an option does not take.
    """
    try:
        given = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: 2027-02-31, no UTF-8
        raise _refused(path, str(error)) from error
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise _refused(path, "must be a mapping of options and sections")
    # YAML is written with either; a flag's own spelling is what people copy.
    named = {str(key).replace("-", "_"): value for key, value in given.items()}
    sections = {key: named.pop(key) for key in SECTIONS if key in named}
    for key, value in named.items():
        if key not in options:
            raise _refused(path, f"unknown key '{key}'")
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise _refused(path, f"'{key}' must be a single value")
        try:
            if value is not None:
                options[key](value)
        except typer.BadParameter as error:
            raise _refused(path, f"'{key}': {error.message}") from error
    try:
        edge = EdgeSettings.model_validate({k: v for k, v in sections.items() if v is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        what = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise _refused(path, f"'{where}': {what}") from error
    return {key: value for key, value in named.items() if value is not None}, edge


def _refused(path: Path, message: str) -> Refused:
    return Refused(ExitCode.USAGE, f"{path}: {message}")
