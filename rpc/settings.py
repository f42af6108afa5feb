"""Settings of a service: flags over environment (TANDEM_*) over a YAML file over defaults; errors name the flag and have no traceback."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from rpc.failpoints import ENVIRONMENT_VARIABLE as FAILPOINTS_VARIABLE

ENVIRONMENT_PREFIX = "TANDEM_"
USAGE_EXIT_CODE = 2
_EPILOG = (
    f"Each setting is also read from the environment as {ENVIRONMENT_PREFIX}<NAME> and from the YAML file of --config; flags win over the environment, "
    f"the environment wins over the file. Tracing is set up by the OTEL_* variables and off unless OTEL_EXPORTER_OTLP_ENDPOINT is set. "
    f"A test facility: {FAILPOINTS_VARIABLE}=<segment>=delay:<seconds>,... makes segments of a request slow."
)

Port = Annotated[int, Field(ge=0, le=65535)]


class YamlError(ValueError):
    """The configuration file cannot be used."""


class ServiceSettings(BaseSettings):
    """What every service can be told. Services add fields of their own; the docstring under a field is its help text."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    config: Path | None = None
    """YAML file with any of these settings, named as the flags with underscores."""
    instance: str = ""
    """Name of this instance in traces, logs and the other services' lists; default: the service's name and port."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but a loopback address is open to the network."""
    port: Port = 0
    """Port to listen on; 0 takes any free one and logs it."""
    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint."""
    metrics_port: Annotated[int, Field(ge=-1, le=65535)] = 0
    """Port of the Prometheus endpoint; 0 takes any free one and logs it, -1 serves none."""
    log_format: Literal["json", "text"] = "text"
    """Form of the log lines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines that are written."""
    drain_grace_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that running requests get to end after SIGTERM or SIGINT; a second signal ends the process at once."""
    max_request_time_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time for a request, and its deadline when the client sets none."""
    reflection: bool = True
    """Serve gRPC reflection."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Constructor over environment over the YAML file that the constructor was given as `config`; load_settings puts the flags in front."""
        path = getattr(init_settings, "init_kwargs", {}).get("config")
        file = InitSettingsSource(settings_cls, _read_yaml(settings_cls, Path(path)) if path else {})
        return (init_settings, env_settings, file)


S = TypeVar("S", bound=ServiceSettings)


def load_settings(cls: type[S], argv: Sequence[str] | None = None, *, prog: str | None = None) -> S:
    """Reads all sources; `argv` defaults to sys.argv[1:]. Exits with code 2 and one line per error; --help exits with 0."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog=prog, description=cls.__doc__, epilog=_EPILOG, allow_abbrev=False)
    try:
        flags: CliSettingsSource[Any] = CliSettingsSource(
            cls, cli_parse_args=arguments, root_parser=parser, parse_args_method=argparse.ArgumentParser.parse_args, formatter_class=argparse.HelpFormatter
        )
        file: dict[str, Any] = {"config": path} if (path := _config_path(arguments)) else {}
        return cls(_cli_settings_source=flags, **file)
    except ValidationError as error:
        problems = [_describe(problem) for problem in error.errors()]
    except (SettingsError, YamlError) as error:
        problems = [str(error)]
    print(*(f"{parser.prog}: error: {problem}" for problem in problems), sep="\n", file=sys.stderr)
    raise SystemExit(USAGE_EXIT_CODE)


def flag_of(field: str) -> str:
    """`metrics_port` as `--metrics-port`."""
    return "--" + field.replace("_", "-")


def _config_path(arguments: Sequence[str]) -> str | None:
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    found: str | None = finder.parse_known_args(arguments)[0].config
    return found or os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG")


def _read_yaml(cls: type[BaseSettings], path: Path) -> dict[str, Any]:
    """The file's settings. Raises YamlError, also for a key that is no setting."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise YamlError(f"--config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise YamlError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise YamlError(f"--config: {path} holds no mapping of settings")
    known = set(cls.model_fields) - {"config"}
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise YamlError(f"--config: {path}: unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    return content


def _describe(problem: Any) -> str:
    field = str(problem["loc"][0]) if problem["loc"] else ""
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not field:
        return message
    given = "" if problem["type"] == "missing" else f" (got {problem['input']!r})"
    return f"{flag_of(field)} (environment {ENVIRONMENT_PREFIX}{field.upper()}, file {field}): {message}{given}"
